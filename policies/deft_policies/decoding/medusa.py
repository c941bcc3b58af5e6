"""Medusa-style parallel heads: head k says which token comes k places after the next one.

Each head is one residual block over the target's last hidden state; the target's own
language-model head turns what comes out into tokens, so heads are small. Shared with training.
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.checkpoint.tensor_file import read_tensors, write_tensors
from deft_policies.errors import CheckpointError

_WEIGHTS = "model.safetensors"
_FORMAT = "deft-medusa-1"


class MedusaHeads(nn.Module):
    """h_k = h + silu(W_k h + b_k), k = 1..num_heads; head k looks k places ahead."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.width, self.num_heads = width, num_heads
        self.weight = nn.Parameter(torch.zeros(num_heads, width, width))
        self.bias = nn.Parameter(torch.zeros(num_heads, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """From [..., width] to [..., head, width], to be read by the target's own head."""
        mixed = torch.einsum("...i,koi->...ko", hidden, self.weight) + self.bias
        return hidden.unsqueeze(-2) + functional.silu(mixed)


def save_medusa(heads: MedusaHeads, directory: Path) -> None:
    """Write `config.json` and the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"format": _FORMAT, "hidden_size": heads.width, "num_heads": heads.num_heads}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tensors(dict(heads.named_parameters()), directory / _WEIGHTS)


def is_medusa(directory: Path) -> bool:
    """Whether a draft-head directory holds Medusa heads; False if it cannot be told."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("format") == _FORMAT


def load_medusa(directory: Path, width: int, like: Tensor) -> MedusaHeads:
    """Read heads for a target of `width`, on the device and in the dtype of `like`."""
    path = directory / _WEIGHTS
    if not is_medusa(directory):
        raise CheckpointError(f"{directory}/config.json does not describe Medusa heads")
    tensors = read_tensors(path)
    if set(tensors) != {"weight", "bias"}:
        raise CheckpointError(f"{path} must hold 'weight' and 'bias', got {sorted(tensors)}")
    num_heads, found = tensors["weight"].shape[0], tensors["weight"].shape[-1]
    if found != width or tensors["bias"].shape != (num_heads, width):
        raise CheckpointError(
            f"{path}: the heads are {found} wide, but the target is {width}; "
            "heads only fit the model they were trained for"
        )
    heads = MedusaHeads(width, num_heads)
    heads.load_state_dict(dict(tensors))
    return heads.to(like.device, like.dtype).requires_grad_(False).eval()
