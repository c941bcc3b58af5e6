"""In which order a model looks through its cameras."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from deft_core.types import Observation
from deft_policies.errors import RequestError
from deft_policies.families.model import Model


def seen(names: list[str], num_pictures: int) -> list[int]:
    """The pictures that a model looks at, as the places of their names; -1 is the frame."""
    pictures = {name: np.full((2, 2, 3), place, np.uint8) for place, name in enumerate(names)}
    frame = np.full((2, 2, 3), 255, np.uint8)
    model = cast(Model, SimpleNamespace(num_pictures=num_pictures))
    model.camera_names = Model.camera_names.fget(model)  # type: ignore[attr-defined,misc]
    found = Model.pictures(model, Observation(frame, "lift", pictures))
    return [-1 if one[0, 0, 0] == 255 else int(one[0, 0, 0]) for one in found]


@pytest.mark.parametrize(
    ("names", "num_pictures", "order"),
    [
        (["front"], 1, [-1]),
        (["wrist"], 2, [-1, 0]),
        (["left_wrist"], 2, [-1, 0]),
        (["wrist_1", "front", "wrist_0"], 3, [-1, 2, 0]),  # by name, whatever came first
        (["right_wrist", "left_wrist"], 3, [-1, 0, 1]),  # other names: as they came
    ],
)
def test_cameras_are_looked_at_by_name_or_as_they_came(
    names: list[str], num_pictures: int, order: list[int]
) -> None:
    assert seen(names, num_pictures) == order


def test_a_missing_camera_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(RequestError, match="wrist_0 and wrist_1 or others"):
        seen(["wrist_0"], 3)
