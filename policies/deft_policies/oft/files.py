"""Reads the files that OFT's training writes beside a model. Sizes come from the tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from deft_policies.checkpoint.reader import list_names
from deft_policies.checkpoint.tensor_file import read_tensors
from deft_policies.errors import CheckpointError
from deft_policies.oft.modules import RegressionHead, StateProjector
from deft_policies.oft.recognition import OftFile, find_file

# Names start with this where the module was wrapped for training on several GPUs.
_WRAPPER = "module."
_HEAD_PREFIX = "model."
_DIFFUSION_PREFIX = "noise_predictor."

ModuleT = TypeVar("ModuleT", bound=nn.Module)


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
    path = find_file(directory, OftFile.HEAD)
    if path is None:
        return None
    tensors = read_part(path)
    if find_file(directory, OftFile.NOISE) is not None or any(
        name.startswith(_DIFFUSION_PREFIX) for name in tensors
    ):
        raise CheckpointError(
            f"{path} is a diffusion head, which is not supported; give a fine-tune with an L1 head "
            "or without a head"
        )
    own = {name.removeprefix(_HEAD_PREFIX): one for name, one in tensors.items()}
    action_dim = own["fc2.bias"].numel() if "fc2.bias" in own else 1
    blocks = {name.split(".")[1] for name in own if name.startswith("mlp_resnet_blocks.")}
    with torch.device("meta"):
        head = RegressionHead(width, action_dim, len(blocks))
    return _fill(head, own, path)


def load_state_projector(directory: Path, width: int) -> StateProjector | None:
    """Read what turns the robot's state into a token; None where the model gets none."""
    path = find_file(directory, OftFile.STATE)
    if path is None:
        return None
    tensors = read_part(path)
    first = tensors.get("fc1.weight")
    with torch.device("meta"):
        projector = StateProjector(
            1 if first is None or first.dim() != 2 else first.shape[1], width
        )
    return _fill(projector, tensors, path)


def _fill(module: ModuleT, tensors: Mapping[str, Tensor], path: Path) -> ModuleT:
    """Give a module its tensors, or say how the file does not fit it."""
    wanted = {name: one.shape for name, one in module.state_dict().items()}
    found = {name: one.shape for name, one in tensors.items()}
    wrong = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    if wrong:
        raise CheckpointError(
            f"{path} does not fit the model beside it; missing, unexpected or of the wrong shape: "
            f"{list_names(wrong)}; restore the files of one fine-tuning run"
        )
    module.load_state_dict(dict(tensors), assign=True)
    return module.eval().requires_grad_(False)
