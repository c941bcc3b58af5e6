"""The files that OFT's training writes into a model's folder: which there are, and what is in them.

Sizes come from the tensors. The towers of a fine-tune with FiLM are one file, which replaces those
of the model in its folder; its adapters are not merged, unlike everything else in such a folder,
and no file says their scale.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from deft_policies.checkpoint.lora import ADAPTER_FOLDER
from deft_policies.checkpoint.open import CheckpointSource
from deft_policies.checkpoint.tensor_file import describe_misfits, fill_module, read_tensors
from deft_policies.errors import CheckpointError
from deft_policies.families.oft.modules import Film, RegressionHead, StateProjector
from deft_policies.model.sizes import OpenVLAConfig, TowerConfig
from deft_policies.model.tensor_names import tensor_places

PICKLE_SUFFIX, SAFETENSORS_SUFFIX = ".pt", ".safetensors"
_SUFFIXES = (SAFETENSORS_SUFFIX, PICKLE_SUFFIX)  # a converted file before what it was made from
# Names start with this where the module was wrapped for training on several GPUs.
_WRAPPER = "module."
_HEAD_PREFIX = "model."
_DIFFUSION_PREFIX = "noise_predictor."
_LARGEST_ALPHA = 16  # training sets alpha to the rank, or to this where the rank is larger
_REMEDY = "restore the files of one fine-tuning run"
_WRAPPED_BLOCK = re.compile(r"(blocks\.\d+)\.block\.")


# Files that training writes into the model's folder; names contain these and `checkpoint`.
HEAD, STATE, VISION = "action_head", "proprio_projector", "vision_backbone"
_NOISE = "noisy_action_projector"
PARTS = (HEAD, STATE, VISION, _NOISE)


def find_file(directory: Path, part: str) -> Path | None:
    """The one file of a part, the converted one where there are both; None if there is none."""
    named = sorted(directory.glob(f"*{part}*"))
    paths = [path for path in named if "checkpoint" in path.name and path.suffix in _SUFFIXES]
    if len({path.stem for path in paths}) > 1:
        names = ", ".join(path.name for path in paths)
        raise CheckpointError(
            f"{directory} holds several files of the {part}: {names}; keep those of one step"
        )
    return min(paths, key=lambda path: _SUFFIXES.index(path.suffix), default=None)


def sign_of_oft(source: CheckpointSource) -> str:
    """What makes a folder without a head look like OFT's all the same; empty if nothing does."""
    if (source.tuned / ADAPTER_FOLDER).is_dir():
        return f"a folder {ADAPTER_FOLDER}"
    statistics = source.read_statistics()
    for key in statistics.names:
        state = statistics.section(key).section("proprio")
        if any(
            any(state.values(row, float))
            for row in state.names
            if row != "mask" and state.is_list(row)
        ):
            return f"the proprio statistics of {key} in {statistics.path} are filled"
    return ""


def read_part(path: Path) -> dict[str, Tensor]:
    """Read a part's tensors by their names inside the module.

    Everything is rounded to bfloat16, in which the original runs these modules, whatever the file.
    """
    return {
        name.removeprefix(_WRAPPER): tensor.bfloat16()
        for name, tensor in read_tensors(path).items()
    }


def load_head(directory: Path, width: int) -> RegressionHead | None:
    """Read the head that answers with numbers; None where the model answers with tokens."""
    path = find_file(directory, HEAD)
    if path is None:
        return None
    tensors = read_part(path)
    if find_file(directory, _NOISE) is not None or any(
        name.startswith(_DIFFUSION_PREFIX) for name in tensors
    ):
        raise CheckpointError(
            f"{path} is a diffusion head, which is not supported; give a fine-tune with an L1 head "
            "or without a head"
        )
    own = {name.removeprefix(_HEAD_PREFIX): tensor for name, tensor in tensors.items()}
    action_dim = own["fc2.bias"].numel() if "fc2.bias" in own else 1
    blocks = {name.split(".")[1] for name in own if name.startswith("mlp_resnet_blocks.")}
    with torch.device("meta"):
        head = RegressionHead(width, action_dim, len(blocks))
    return fill_module(head, own, path, _REMEDY)


def load_state_projector(directory: Path, width: int) -> StateProjector | None:
    """Read what turns the robot's state into a token; None where the model gets none."""
    path = find_file(directory, STATE)
    if path is None:
        return None
    tensors = read_part(path)
    first = tensors.get("fc1.weight")
    with torch.device("meta"):
        projector = StateProjector(
            1 if first is None or first.dim() != 2 else first.shape[1], width
        )
    return fill_module(projector, tensors, path, _REMEDY)


class FilmTowers:
    """The tensors of the file, as changes to the weights of the model in its folder."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._path = path
        self._tensors = {
            _WRAPPED_BLOCK.sub(r"\1.", name): tensor for name, tensor in tensors.items()
        }

    def check(self, config: OpenVLAConfig) -> None:
        """Raise `CheckpointError` unless every weight in use is here and in shape."""
        wanted = {
            place.name: place.shape
            for place in tensor_places(config)
            if place.parameter is not None and place.parameter.startswith("towers.")
        }
        bases = {name: self._tensors.get(name, self._tensors.get(_base(name))) for name in wanted}
        shapes = {name: tuple(base.shape) for name, base in bases.items() if base is not None}
        if misfits := describe_misfits(wanted, shapes):
            raise CheckpointError(
                f"{self._path} does not fit the model in its folder; {misfits}; {_REMEDY}"
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
                for name, tensors in parts.items():
                    tensors.append(self._find(f"{tower.prefix}.blocks.{index}.{kind}.{name}"))
        with torch.device("meta"):
            film = Film(width, tower.width, tower.num_used_blocks)
        joined = {f"modulate.{name}": torch.cat(tensors) for name, tensors in parts.items()}
        return fill_module(film, joined, self._path, _REMEDY)

    def _find(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self._path} has no {name}; expected a fine-tune with FiLM")
        return self._tensors[name]


def _base(name: str) -> str:
    """PEFT's name of a weight or bias to which it adds its own."""
    module, _, kind = name.rpartition(".")
    return f"{module}.base_layer.{kind}"
