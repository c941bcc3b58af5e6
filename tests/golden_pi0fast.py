"""pi0-FAST's reference answers: tests/golden/pi0fast/README.md says how they were computed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from deft_core.types import Observation
from deft_policies.families.options import ModelOptions
from deft_policies.model.formats import Precision
from tests.golden_sets import frames_of, variant_of

GOLDEN = Path(__file__).parent / "golden/pi0fast"
VARIANTS = ("quantile", "meanstd")


def variant(name: str) -> dict[str, Any]:
    """Cases, sessions and details of a checkpoint."""
    return variant_of(GOLDEN, name)


def case(name: str, number: int) -> dict[str, Any]:
    """A single frame, by the number it was made with."""
    return next(one for one in variant(name)["cases"] if one["number"] == number)


def frames(name: str) -> Iterator[dict[str, Any]]:
    """Every single case, then every frame of every session."""
    return frames_of(variant(name))


def options_of(name: str, **more: Any) -> ModelOptions:
    """In float32."""
    more.setdefault("precision", Precision.FLOAT32)
    return ModelOptions(checkpoint=str(GOLDEN / name), **more)


def picture(path: str) -> NDArray[np.uint8]:
    return np.asarray(Image.open(GOLDEN / path).convert("RGB"))


def observation(frame: dict[str, Any]) -> Observation:
    """With cameras by LeRobot's names, the first of them as the frame."""
    cameras = {name: picture(path) for name, path in frame["images"].items()}
    first = next(iter(cameras.values()))
    return Observation(first, frame["instruction"], cameras, np.float32(frame["state"]))
