"""QwenFAST's and NORA's reference answers: tests/golden/qwenfast/README.md says how they came."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from deft_policies.families.options import ModelOptions
from tests.golden_sets import frames_of, variant_of

GOLDEN = Path(__file__).parent / "golden/qwenfast"
VARIANTS = ("libero", "bridge", "nora", "nora_long")


def variant(name: str) -> dict[str, Any]:
    """Cases, sessions and details of a checkpoint."""
    return variant_of(GOLDEN, name)


def options_of(name: str, **more: Any) -> ModelOptions:
    """How it is named; no file says how many actions NORA-long answers with."""
    if name == "nora_long":
        more.setdefault("num_steps", 5)
    return ModelOptions(checkpoint=str(GOLDEN / variant(name)["checkpoint"]), **more)


def frames(name: str) -> Iterator[dict[str, Any]]:
    """Every single case, then every frame of every session."""
    return frames_of(variant(name))


def cameras(frame: dict[str, Any]) -> list[NDArray[np.uint8]]:
    """The frame, and the wrist camera where there is one."""
    return [np.asarray(Image.open(GOLDEN / name).convert("RGB")) for name in frame["images"]]
