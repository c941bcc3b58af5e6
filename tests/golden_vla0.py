"""VLA-0's reference answers: tests/golden/vla0/README.md says how they were computed."""

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

GOLDEN = Path(__file__).parent / "golden/vla0"
VARIANTS = ("tied", "untied")


@cache
def variant(name: str) -> dict[str, Any]:
    """Cases, sessions and details of a checkpoint."""
    found: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())["variants"][name]
    return found


def frames(name: str) -> Iterator[dict[str, Any]]:
    """Every single case, then every frame of every session."""
    yield from variant(name)["cases"]
    for session in variant(name)["sessions"]:
        for frame in session["frames"]:
            yield {**frame, "instruction": session["instruction"]}


def cameras(frame: dict[str, Any]) -> list[NDArray[np.uint8]]:
    """The frame and the wrist camera."""
    return [np.asarray(Image.open(GOLDEN / name).convert("RGB")) for name in frame["images"]]


def digest(values: NDArray[Any]) -> str:
    """As the reference notes arrays."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
