"""What robots send and get back, as values."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from deft_client.types import ActOptions, Observation, StageTimings, replace_unchecked


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


def test_a_state_that_is_a_list_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match="state must be a numpy array.*got list.*np.asarray"):
        Observation(np.zeros((8, 8, 3), np.uint8), "lift the cup", state=[0.0] * 8)


def test_an_altered_record_is_what_replace_makes_of_it():
    asked, spent = ActOptions("arm", radius=3), StageTimings(wire_ms=1.0)

    assert replace_unchecked(asked, {"session_id": "b"}) == replace(asked, session_id="b")
    assert replace_unchecked(spent, {"queue_ms": 2.0, "wire_ms": 0.5}) == StageTimings(0.5, 2.0)
    assert (asked.session_id, spent.queue_ms) == ("arm", 0.0)
