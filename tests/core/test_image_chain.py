import hashlib
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deft_core.image_chain import ImageChain, crop_centre, resize_lanczos3, round_trip_jpeg
from tests import golden, slow_image_chain

pytestmark = pytest.mark.promise


def noise(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """The hardest picture there is: every rounding counts somewhere."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def upright(frame: str) -> NDArray[np.uint8]:
    return np.ascontiguousarray(golden.chain_image(frame, "0_input")[::-1, ::-1])


@pytest.mark.parametrize("frame", golden.CHAIN_FRAMES)
def test_jpeg_round_trip_equals_tensorflow(frame: str) -> None:
    assert np.array_equal(round_trip_jpeg(upright(frame)), golden.chain_image(frame, "2_jpeg"))


@pytest.mark.parametrize("frame", golden.CHAIN_FRAMES)
def test_resize_equals_tensorflow(frame: str) -> None:
    resized = resize_lanczos3(golden.chain_image(frame, "2_jpeg"))
    assert np.array_equal(resized, golden.chain_image(frame, "3_lanczos3"))


@pytest.mark.parametrize("frame", golden.CHAIN_FRAMES)
def test_crop_equals_tensorflow(frame: str) -> None:
    cropped = crop_centre(golden.chain_image(frame, "3_lanczos3"))
    assert np.array_equal(cropped, golden.chain_image(frame, "4_crop"))


@pytest.mark.parametrize("frame", golden.CHAIN_FRAMES)
def test_whole_chain_equals_tensorflow(frame: str) -> None:
    assert np.array_equal(
        ImageChain.LIBERO.apply(upright(frame)), golden.chain_image(frame, "4_crop")
    )
    uncropped = ImageChain.LIBERO_UNCROPPED.apply(upright(frame))
    assert np.array_equal(uncropped, golden.chain_image(frame, "3_lanczos3"))


def test_no_chain_leaves_the_frame_alone() -> None:
    frame = noise(48, 64)
    assert ImageChain.NONE.apply(frame) is frame


@given(height=st.integers(1, 60), width=st.integers(1, 60), size=st.integers(2, 40))
@settings(max_examples=25, deadline=None)
def test_resize_equals_its_slow_twin_at_any_size(height: int, width: int, size: int) -> None:
    frame = noise(height, width, seed=height * 100 + width)
    resized = resize_lanczos3(frame, size)
    assert np.array_equal(resized, slow_image_chain.resize_lanczos3(frame, size))


@given(height=st.integers(2, 40), width=st.integers(2, 40), size=st.integers(2, 30))
@settings(max_examples=25, deadline=None)
def test_crop_equals_its_slow_twin_at_any_size(height: int, width: int, size: int) -> None:
    frame = noise(height, width, seed=height * 100 + width)
    assert np.array_equal(crop_centre(frame, size), slow_image_chain.crop_centre(frame, size))


@pytest.mark.parametrize(
    ("height", "width", "seed"), [(240, 320, 0), (256, 256, 1), (300, 225, 2), (480, 640, 1)]
)
def test_resize_equals_its_slow_twin_on_camera_frames(height: int, width: int, seed: int) -> None:
    """In three of these some sums round differently when added in another order."""
    frame = noise(height, width, seed)
    resized = resize_lanczos3(frame, 224)
    assert np.array_equal(resized, slow_image_chain.resize_lanczos3(frame, 224))


def test_a_frame_of_the_right_size_is_not_resized() -> None:
    frame = noise(224, 224)
    assert np.array_equal(resize_lanczos3(frame), frame)
    assert resize_lanczos3(frame) is not frame


@pytest.mark.parametrize("step", [resize_lanczos3, crop_centre, round_trip_jpeg])
def test_steps_leave_their_input_as_it_was(step: object) -> None:
    frame = noise(256, 256)
    before = hashlib.sha256(frame.tobytes()).digest()
    assert callable(step)
    step(frame)
    assert hashlib.sha256(frame.tobytes()).digest() == before


def test_results_survive_the_next_frame() -> None:
    """Buffers are reused between frames; an answer must not share them."""
    first = resize_lanczos3(noise(256, 256, seed=1))
    kept = first.copy()
    resize_lanczos3(noise(256, 256, seed=2))
    ImageChain.LIBERO.apply(noise(256, 256, seed=3))
    assert np.array_equal(first, kept)


def test_threads_do_not_disturb_each_other() -> None:
    frames = [noise(256, 256, seed=seed) for seed in range(4)]
    expected = [resize_lanczos3(frame) for frame in frames]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(5):
            if not np.array_equal(resize_lanczos3(frames[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
