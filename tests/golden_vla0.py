"""VLA-0's reference answers: tests/golden/vla0/README.md says how they were computed."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.golden_sets import frames_of, variant_of

GOLDEN = Path(__file__).parent / "golden/vla0"
VARIANTS = ("tied", "untied")


def variant(name: str) -> dict[str, Any]:
    """Cases, sessions and details of a checkpoint."""
    return variant_of(GOLDEN, name)


def frames(name: str) -> Iterator[dict[str, Any]]:
    """Every single case, then every frame of every session."""
    return frames_of(variant(name))


def cameras(frame: dict[str, Any]) -> list[NDArray[np.uint8]]:
    """The frame and the wrist camera."""
    return [np.asarray(Image.open(GOLDEN / name).convert("RGB")) for name in frame["images"]]


def digest(values: NDArray[Any]) -> str:
    """As the reference notes arrays."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
