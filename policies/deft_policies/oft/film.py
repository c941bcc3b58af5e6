"""The towers of a fine-tune with FiLM: one file that replaces those of the model beside it.

Its adapters are not merged, unlike everything else in such a folder, and no file says their scale.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from deft_policies.checkpoint.reader import list_names
from deft_policies.checkpoint.tensor_names import tensor_places
from deft_policies.errors import CheckpointError
from deft_policies.model.sizes import OpenVLAConfig, TowerConfig
from deft_policies.oft.files import read_part
from deft_policies.oft.modules import Film
from deft_policies.oft.recognition import OftFile, find_file

_LARGEST_ALPHA = 16  # training sets alpha to the rank, or to this where the rank is larger
_WRAPPED_BLOCK = re.compile(r"(blocks\.\d+)\.block\.")


class FilmTowers:
    """The tensors of the file, as changes to the weights of the model beside it."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._path = path
        self._tensors = {_WRAPPED_BLOCK.sub(r"\1.", name): one for name, one in tensors.items()}

    @staticmethod
    def load(directory: Path) -> "FilmTowers | None":
        """Read the file; None where the towers are the model's own."""
        path = find_file(directory, OftFile.VISION)
        return None if path is None else FilmTowers(path, read_part(path))

    def check(self, config: OpenVLAConfig) -> None:
        """Raise `CheckpointError` unless every weight in use is here and in shape."""
        wanted = {
            place.name: place.shape
            for place in tensor_places(config)
            if place.parameter is not None and place.parameter.startswith("towers.")
        }
        wrong = []
        for name, shape in wanted.items():
            base = self._tensors.get(name, self._tensors.get(_base(name)))
            if base is None or base.shape != shape:
                wrong.append(name)
        if wrong:
            raise CheckpointError(
                f"{self._path} does not fit the model beside it; missing or of the wrong shape: "
                f"{list_names(wrong)}; restore the files of one fine-tuning run"
            )

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """The weight that the file has in place of this one, in float32 where it is adapted."""
        if name in self._tensors:
            return self._tensors[name].to(weight.device)
        base = self._tensors.get(_base(name))
        if base is None:
            return weight
        base = base.to(weight.device)
        module = name.removesuffix(".weight")
        down = self._tensors.get(f"{module}.lora_A.default.weight")
        if down is None or module == name:
            return base
        up = self._find(f"{module}.lora_B.default.weight")
        scale = min(len(down), _LARGEST_ALPHA) / len(down)
        change = up.to(weight.device).float().flatten(1) @ down.to(weight.device).float().flatten(1)
        return base.float() + scale * change.view(base.shape)

    def build_film(self, config: OpenVLAConfig) -> nn.ModuleList:
        """What an instruction does to each tower."""
        return nn.ModuleList(self._build_one(tower, config.llm.width) for tower in config.towers)

    def _build_one(self, tower: TowerConfig, width: int) -> Film:
        parts: dict[str, list[Tensor]] = {"weight": [], "bias": []}
        for index in range(tower.num_used_blocks):
            for kind in ("scale", "shift"):
                for name, found in parts.items():
                    found.append(self._find(f"{tower.prefix}.blocks.{index}.{kind}.{name}"))
        with torch.device("meta"):
            film = Film(width, tower.width, tower.num_used_blocks)
        joined = {f"modulate.{name}": torch.cat(found) for name, found in parts.items()}
        if any(joined[name].shape != one.shape for name, one in film.state_dict().items()):
            raise CheckpointError(
                f"{self._path}: the scales and shifts of {tower.prefix} do not fit a decoder "
                f"{width} wide; restore the files of one fine-tuning run"
            )
        film.load_state_dict(joined, assign=True)
        return film.eval().requires_grad_(False)

    def _find(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self._path} has no {name}; expected a fine-tune with FiLM")
        return self._tensors[name]


def _base(name: str) -> str:
    """What PEFT calls a weight or bias beside which it puts its own."""
    module, _, kind = name.rpartition(".")
    return f"{module}.base_layer.{kind}"
