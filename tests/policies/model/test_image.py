import hashlib
import json

import numpy as np
import pytest
import torch

from deft_client.image_chain import ImageChain
from deft_policies.checkpoint.config import load_config
from deft_policies.model.image import ImageProcessor
from deft_policies.model.sizes import ImageProcessorConfig, ResizeStrategy
from tests import golden

DINOV2 = ((0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375))
SIGLIP = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
PROCESSOR_CASES = json.loads((golden.GOLDEN / "processor.json").read_text())


def sha256(values: torch.Tensor) -> str:
    assert values.dtype is torch.float32
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def tiny_processor(chain: ImageChain = ImageChain.NONE) -> ImageProcessor:
    return ImageProcessor(load_config(golden.TINY_OPENVLA).image, chain)


@pytest.mark.parametrize("case", golden.cases_with_image(), ids=lambda case: str(case.number))
def test_pixel_values_equal_the_original_processor(case: golden.GoldenCase) -> None:
    processor = tiny_processor()
    values = processor.pixel_values([processor.fit(case.image())])
    assert values.shape == (1, 6, 224, 224)
    assert sha256(values) == case.pixel_values_sha256


def test_pixel_values_equal_the_original_array() -> None:
    processor = tiny_processor()
    values = processor.pixel_values([processor.fit(golden.cases()[4].image())])
    assert np.array_equal(values.numpy(), golden.arrays()["pixel_values_04"])


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
    processor = ImageProcessor(config, ImageChain.NONE)
    assert sha256(processor.pixel_values([processor.fit(frame)])[0]) == case["sha256"]


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


def test_libero_chain_runs_before_the_processor_when_asked() -> None:
    frame = np.ascontiguousarray(golden.chain_image("synth256", "0_input")[::-1, ::-1])
    fitted = tiny_processor(ImageChain.LIBERO).fit(frame)
    assert np.array_equal(fitted, golden.chain_image("synth256", "4_crop"))
    assert not np.array_equal(tiny_processor().fit(frame), fitted)
