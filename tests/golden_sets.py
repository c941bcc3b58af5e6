"""Reference answers of several checkpoints in one `expected.json`: cases and sessions of each."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any


@cache
def variant_of(golden: Path, name: str) -> dict[str, Any]:
    """Cases, sessions and details of a checkpoint."""
    found: dict[str, Any] = json.loads((golden / "expected.json").read_text())["variants"][name]
    return found


def frames_of(variant: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every single case, then every frame of every session."""
    yield from variant["cases"]
    for session in variant["sessions"]:
        for frame in session["frames"]:
            yield {**frame, "instruction": session["instruction"]}
