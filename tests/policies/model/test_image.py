import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image as PillowImage

from deft_core.image_chain import ImageChain
from deft_policies.checkpoint.config import load_config
from deft_policies.model.bicubic import resize_bicubic
from deft_policies.model.image import ImageProcessor, resize_like_processor, resize_on_device
from deft_policies.model.sizes import ImageProcessorConfig, ResizeStrategy
from tests import golden
from tests.launches import LaunchCounter

DINOV2 = ((0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375))
SIGLIP = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
PROCESSOR_CASES = json.loads((golden.GOLDEN / "processor.json").read_text())


def sha256(values: torch.Tensor) -> str:
    assert values.dtype is torch.float32
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def tiny_processor(chain: ImageChain = ImageChain.NONE) -> ImageProcessor:
    return ImageProcessor(load_config(golden.TINY_OPENVLA).image, chain)


@pytest.mark.promise
@pytest.mark.parametrize("case", golden.cases_with_image(), ids=lambda case: str(case.number))
def test_pixel_values_equal_the_original_processor(case: golden.GoldenCase) -> None:
    processor = tiny_processor()
    values = processor.pixel_values([processor.fit(case.image())])
    assert values.shape == (1, 6, 224, 224)
    assert sha256(values) == case.pixel_values_sha256


@pytest.mark.promise
def test_pixel_values_equal_the_original_array() -> None:
    processor = tiny_processor()
    values = processor.pixel_values([processor.fit(golden.cases()[4].image())])
    assert np.array_equal(values.numpy(), golden.arrays()["pixel_values_04"])


@pytest.mark.promise
@pytest.mark.parametrize(
    "case", PROCESSOR_CASES, ids=lambda c: f"{c['strategy']}-{c['height']}x{c['width']}"
)
def test_every_strategy_equals_torchvision(case: dict[str, object]) -> None:
    resize = ResizeStrategy(case["strategy"])
    assert isinstance(case["size"], int)
    first, second, third = case["fill"]
    config = ImageProcessorConfig(
        resize=resize,
        size=case["size"],
        is_stretched=resize is ResizeStrategy.NAIVE,
        letterbox_fill=(first, second, third),
        normalizations=(DINOV2, SIGLIP) if case["towers"] == 2 else (SIGLIP,),
    )
    frame = np.random.default_rng(case["seed"]).integers(
        0, 256, (case["height"], case["width"], 3), dtype=np.uint8
    )
    for on_device in (False, True):
        processor = ImageProcessor(config, ImageChain.NONE, on_device)
        assert sha256(processor.pixel_values([processor.fit(frame)])[0]) == case["sha256"]


CAMERAS = (
    *((256, 256), (224, 224), (240, 320), (480, 640), (720, 1280), (1080, 1920)),
    *((300, 224), (301, 200), (500, 300), (223, 225), (97, 41), (1, 1), (3, 2), (2, 300)),
)


def random_frame(height: int, width: int) -> NDArray[np.uint8]:
    """Half of it extremes, of which more than a byte comes out between the directions."""
    random = np.random.default_rng(height * width)
    frame = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    frame[: (height + 1) // 2] = 255 * (frame[: (height + 1) // 2] > 127)
    return frame


@pytest.mark.parametrize("shape", CAMERAS, ids=str)
@pytest.mark.parametrize("resize", list(ResizeStrategy))
def test_a_device_resizes_to_the_bytes_that_pillow_makes(
    resize: ResizeStrategy, shape: tuple[int, int]
) -> None:
    is_stretched = resize is ResizeStrategy.NAIVE
    config = ImageProcessorConfig(resize, 224, (1, 127, 250), (SIGLIP,), is_stretched)
    frame = random_frame(*shape)
    expected = resize_like_processor(frame, config)
    if shape == (224, 224):
        assert expected is frame
        return
    found = resize_on_device(torch.from_numpy(frame).permute(2, 0, 1)[None], config)
    assert torch.equal(found[0].permute(1, 2, 0), torch.from_numpy(expected).float())


@pytest.mark.parametrize("size", [224, 384])
@pytest.mark.parametrize("length", [1, 41, 223, 225, 256, 640, 1280, 2160, 3584])
def test_no_sum_of_weights_needs_more_bits_than_there_are(length: int, size: int) -> None:
    """Shrunk as far as a device may, and enlarged, where weights at the border are above 1."""
    line = random_frame(1, length)[:, :, 0]
    picture = PillowImage.fromarray(line).resize((size, 1), PillowImage.Resampling.BICUBIC)
    given = torch.from_numpy(line.copy()).float()[None, None]
    found = resize_bicubic(given, (1, size), (range(1), range(size)))[0, 0]
    assert torch.equal(found, torch.from_numpy(np.array(picture)).float())


def test_frames_of_several_cameras_keep_their_places() -> None:
    config = load_config(golden.TINY_OPENVLA).image
    host, device = (ImageProcessor(config, ImageChain.NONE, where) for where in (False, True))
    shapes = ((256, 256), (240, 320), (256, 256), (config.size, config.size), (240, 320))
    frames = [random_frame(*shape) for shape in shapes]
    fitted = [device.fit(frame) for frame in frames]
    assert all(one is frame for one, frame in zip(fitted, frames, strict=True))
    expected = host.pixel_values([host.fit(frame) for frame in frames])
    assert torch.equal(device.pixel_values(fitted), expected)


def test_what_the_host_does_before_a_resize_it_does_for_a_device_too() -> None:
    frame = random_frame(256, 256)
    host, device = (
        ImageProcessor(load_config(golden.TINY_OPENVLA).image, ImageChain.LIBERO, where)
        for where in (False, True)
    )
    assert np.array_equal(device.fit(frame), host.fit(frame))


def test_a_frame_that_shrinks_too_far_is_resized_by_the_host() -> None:
    config = replace(load_config(golden.TINY_OPENVLA).image, size=8)
    frame = random_frame(130, 20)
    fitted = ImageProcessor(config, ImageChain.NONE, resizes_on_device=True).fit(frame)
    assert np.array_equal(fitted, resize_like_processor(frame, config))


def test_a_device_starts_few_kernels_for_frames_of_one_size() -> None:
    device = ImageProcessor(load_config(golden.TINY_OPENVLA).image, ImageChain.NONE, True)
    frames = [random_frame(256, 256)] * 3
    device.pixel_values(frames)  # makes what later frames share
    with LaunchCounter() as launches:
        device.pixel_values(frames)
    assert launches.total <= 14


@pytest.mark.promise
def test_a_batch_is_its_frames_one_by_one() -> None:
    processor = tiny_processor()
    frames = [processor.fit(case.image()) for case in golden.cases_with_image()[:3]]
    together = processor.pixel_values(frames)
    alone = torch.cat([processor.pixel_values([frame]) for frame in frames])
    assert torch.equal(together, alone)


def test_bfloat16_values_are_the_float32_values_rounded_once() -> None:
    processor = tiny_processor()
    frame = processor.fit(golden.cases()[1].image())
    exact = processor.pixel_values([frame])
    rounded = processor.pixel_values([frame], dtype=torch.bfloat16)
    assert torch.equal(rounded, exact.to(torch.bfloat16))
    assert torch.equal(processor.pixel_values([frame]), exact)


@pytest.mark.promise
def test_libero_chain_runs_before_the_processor_when_asked() -> None:
    frame = np.ascontiguousarray(golden.chain_image("synth256", "0_input")[::-1, ::-1])
    fitted = tiny_processor(ImageChain.LIBERO).fit(frame)
    assert np.array_equal(fitted, golden.chain_image("synth256", "4_crop"))
    assert not np.array_equal(tiny_processor().fit(frame), fitted)
