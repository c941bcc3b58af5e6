"""QwenFAST's and NORA's reference answers: tests/golden/qwenfast/README.md says how they came."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from deft_policies.families.options import ModelOptions

GOLDEN = Path(__file__).parent / "golden/qwenfast"
VARIANTS = ("libero", "bridge", "nora", "nora_long")


@cache
def variant(name: str) -> dict[str, Any]:
    """Cases, sessions and details of a checkpoint."""
    found: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())["variants"][name]
    return found


def options_of(name: str, **more: Any) -> ModelOptions:
    """How it is named; no file says how many actions NORA-long answers with."""
    if name == "nora_long":
        more.setdefault("num_steps", 5)
    return ModelOptions(checkpoint=str(GOLDEN / variant(name)["checkpoint"]), **more)


def frames(name: str) -> Iterator[dict[str, Any]]:
    """Every single case, then every frame of every session."""
    yield from variant(name)["cases"]
    for session in variant(name)["sessions"]:
        for frame in session["frames"]:
            yield {**frame, "instruction": session["instruction"]}


def cameras(frame: dict[str, Any]) -> list[NDArray[np.uint8]]:
    """The frame, and the wrist camera where there is one."""
    return [np.asarray(Image.open(GOLDEN / name).convert("RGB")) for name in frame["images"]]
