"""Reads tests/golden/oft: fine-tunes of the tiny OpenVLA, and what OFT's own code makes of them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from deft_core.image_chain import ImageChain
from deft_core.types import Observation
from tests import golden

OFT = golden.GOLDEN / "oft"
_OVERLAY = "model_overlay.safetensors"
# These pictures are OpenVLA's golden ones.
_SHARED = {"full_1.png": "case_04.png", "full_2.png": "case_01.png", "full_3.png": "case_07.png"}


@dataclass(frozen=True, eq=False)
class Variant:
    """One fine-tune and the options it is started with."""

    name: str
    chunk: int
    action_dim: int
    num_pictures: int
    state_dim: int | None
    has_head: bool
    files: tuple[str, ...]

    def write(self, directory: Path) -> Path:
        """Make a whole checkpoint: the tiny OpenVLA with the variant's files beside it."""
        directory.mkdir(parents=True)
        for path in golden.TINY_OPENVLA.iterdir():
            is_merged = path.name == "model.safetensors" and _OVERLAY in self.files
            if path.name not in self.files and not is_merged:
                (directory / path.name).symlink_to(path)
        for name in self.files:
            (directory / name).parent.mkdir(exist_ok=True)
            if name != _OVERLAY:
                (directory / name).symlink_to(OFT / self.name / name)
        if _OVERLAY in self.files:
            weights = load_file(golden.TINY_OPENVLA / "model.safetensors")
            merged = weights | load_file(OFT / self.name / _OVERLAY)
            save_file(merged, directory / "model.safetensors", {"format": "pt"})
        return directory


@dataclass(frozen=True, eq=False)
class OftCase:
    """Pictures, instruction and state, and the answer in float32. `fields` is the whole record."""

    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.fields['variant']}_{self.fields['case']}"

    @property
    def variant(self) -> Variant:
        return variants()[self.fields["variant"]]

    @property
    def instruction(self) -> str:
        return str(self.fields["instruction"])

    @property
    def statistics_key(self) -> str:
        return str(self.fields["unnorm_key"])

    @property
    def state(self) -> NDArray[np.float64] | None:
        found = self.fields.get("state")
        return None if found is None else np.array(found)

    @property
    def actions(self) -> NDArray[np.float64]:
        """[step, action_dim] in robot units."""
        return np.array(self.fields["actions"])

    def images(self) -> list[NDArray[np.uint8]]:
        return [golden.load_rgb(picture_path(name)) for name in self.fields["images"]]

    def observation(self) -> Observation:
        """What OFT's client sends: its pictures, or what its own chain makes of them."""
        image, *wrists = self.images()
        if "client_images_sha256" in self.fields:
            image, *wrists = (ImageChain.LIBERO_UNCROPPED.apply(one) for one in (image, *wrists))
        cameras = {f"wrist_{index}": one for index, one in enumerate(wrists)}
        state = None if self.state is None else self.state.astype(np.float32)
        return Observation(image, self.instruction, cameras, state)

    def array(self, name: str) -> NDArray[np.float32]:
        """An intermediate result: `hidden`, `normalised`, `proprio_embedding`, ..."""
        return arrays()[f"{self.name}_{name}"]


def picture_path(name: str) -> Path:
    if name in _SHARED:
        return golden.GOLDEN / "images" / _SHARED[name]
    return OFT / "images" / name


@lru_cache(maxsize=1)
def variants() -> Mapping[str, Variant]:
    return {
        name: Variant(
            name,
            chunk=one["chunk"],
            action_dim=one["action_dim"],
            num_pictures=one["num_images_in_input"],
            state_dim=one["proprio_dim"],
            has_head=one["use_l1_regression"],
            files=tuple(one["files"]),
        )
        for name, one in _expected()["variants"].items()
    }


@lru_cache(maxsize=1)
def cases() -> tuple[OftCase, ...]:
    return tuple(OftCase(one) for one in _expected()["cases"])


@lru_cache(maxsize=1)
def conventions() -> Mapping[str, Any]:
    return json.loads((OFT / "conventions.json").read_text())


@lru_cache(maxsize=1)
def _expected() -> Mapping[str, Any]:
    return json.loads((OFT / "expected.json").read_text())


@lru_cache(maxsize=1)
def arrays() -> Mapping[str, NDArray[np.float32]]:
    with np.load(OFT / "expected.npz") as archive:
        return {name: archive[name] for name in archive.files}
