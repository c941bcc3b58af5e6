"""Reads tests/golden/ecot: long answers of the tiny OpenVLA, and a checkpoint of one tower."""

import json
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests import golden

if TYPE_CHECKING:
    from torch import Tensor

ECOT = golden.GOLDEN / "ecot"
ONE_TOWER = ECOT / "one_tower"


@lru_cache(maxsize=2)
def expected(folder: Path = ECOT) -> Mapping[str, Any]:
    """`cases`, `sessions` and `meta` (see the README)."""
    found: Mapping[str, Any] = json.loads((folder / "expected.json").read_text())
    return found


def picture(name: str) -> NDArray[np.uint8]:
    """A picture by the name that a case gives it."""
    return golden.load_rgb(picture_path(name))


def picture_path(name: str) -> Path:
    """Where that picture is."""
    own = ECOT / name
    return own if own.exists() else golden.GOLDEN / name


def write(directory: Path, folder: Path = ECOT) -> Path:
    """A whole checkpoint: the tiny OpenVLA with what a folder changes about it."""
    from safetensors.torch import load_file, save_file  # expected answers are read without torch

    shutil.copytree(golden.TINY_OPENVLA, directory)
    meta = expected(folder)["meta"]
    for name in meta.get("replaced_files", ()):
        shutil.copy(folder / name, directory)
    removed = tuple(meta.get("removed_prefixes", ()))
    weights = load_file(directory / "model.safetensors")
    weights = {name: one for name, one in weights.items() if not name.startswith(removed)}
    (directory / "model.safetensors").unlink()
    save_file(
        _overlaid(weights, load_file(folder / "overlay.safetensors")),
        directory / "model.safetensors",
        {"format": "pt"},
    )
    return directory


def _overlaid(weights: dict[str, "Tensor"], changes: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """NAME.rows with NAME.row_ids replace rows, other names whole tensors."""
    for name, change in changes.items():
        base = name.removesuffix(".rows")
        if name.endswith(".row_ids"):
            continue
        if base == name:
            weights[name] = change
        else:
            weights[base][changes[f"{base}.row_ids"].long()] = change
    return weights
