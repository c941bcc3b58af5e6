"""What robots send and get back, as values."""

import numpy as np
import pytest
from PIL import Image

from deft_core.types import Observation


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        ([[[0, 0, 0]]], "list"),
        ("frame.png", "str"),
        (Image.new("RGB", (8, 8)), "Image"),
        ({"image": 1}, "dict"),
    ],
)
def test_what_is_no_array_is_refused_as_an_image_with_a_way_out(image, kind):
    with pytest.raises(ValueError, match=f"image must be a numpy array.*got {kind}.*np.asarray"):
        Observation(image, "lift the cup")
    with pytest.raises(ValueError, match=f"wrist.*got {kind}"):
        Observation(np.zeros((8, 8, 3), np.uint8), "lift the cup", cameras={"wrist": image})


PICTURE = np.zeros((8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    "given",
    [
        [0.5, -1, 3],
        (0.5, -1.0, 3.0),
        np.array([0.5, -1, 3]),
        np.array([0.5, -1, 3], np.float16),
        np.array([0.5, -1, 3], np.float32),
    ],
    ids=lambda given: getattr(given, "dtype", type(given).__name__),
)
def test_a_state_of_other_numbers_is_converted(given):
    """Every driver of a robot yields float64, or a list."""
    state = Observation(PICTURE, "lift the cup", state=given).state
    assert state.dtype == np.float32
    assert state.tolist() == [0.5, -1.0, 3.0]


def test_a_state_of_whole_numbers_is_converted():
    assert Observation(PICTURE, "lift it", state=np.arange(3)).state.dtype == np.float32


def test_a_state_that_is_as_it_is_sent_is_not_copied():
    state = np.zeros(8, np.float32)
    assert Observation(PICTURE, "lift the cup", state=state).state is state


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("0.5,1", r"must be numbers \[state_dim\], got <U5 \[\] \(str\)"),
        ([0.5, None], r"got object \[2\] \(list\)"),
        ([[0.5], [1.0, 2.0]], r"must be numbers \[state_dim\]: "),
        (np.zeros((2, 4)), r"got float64 \[2, 4\]"),
        (0.5, r"got float64 \[\] \(float\)"),
        (np.zeros(3, np.complex128), "got complex128"),
        ([0.5, np.nan], "finite"),
        (np.array([1e300]), "finite in float32"),
    ],
)
def test_a_state_that_is_no_row_of_numbers_is_refused_with_what_arrived(given, said):
    with pytest.raises(ValueError, match=said):
        Observation(PICTURE, "lift the cup", state=given)
