"""Medusa-style parallel heads: head k says which token comes k places after the next one.

Each head is one residual block over the target's last hidden state; the target's own
language-model head turns what comes out into tokens, so heads are small. Shared with training.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.checkpoint.tensor_file import read_tensors, write_tensors
from deft_policies.decoding.drafts.growth import GrowthStart, OpenNodes, grow_tree
from deft_policies.decoding.drafts.sources import Seen
from deft_policies.decoding.plan import DraftKind, TreeShape
from deft_policies.decoding.records import BatchProgress
from deft_policies.decoding.target import PromptFeatures, TargetModel
from deft_policies.decoding.tree import DraftTree
from deft_policies.errors import CheckpointError

_WEIGHTS = "model.safetensors"
_FORMAT = "deft-medusa-1"


@dataclass(frozen=True)
class MedusaSizes:
    """How many places ahead, over hidden states of which width."""

    width: int
    num_heads: int


class MedusaHeads(nn.Module):
    """h_k = h + silu(W_k h + b_k), k = 1..num_heads."""

    def __init__(self, sizes: MedusaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.zeros(sizes.num_heads, sizes.width, sizes.width))
        self.bias = nn.Parameter(torch.zeros(sizes.num_heads, sizes.width))

    def forward(self, hidden: Tensor) -> Tensor:
        """From [..., width] to [..., head, width], to be read by the target's own head."""
        mixed = torch.einsum("...i,koi->...ko", hidden, self.weight) + self.bias
        return hidden.unsqueeze(-2) + functional.silu(mixed)


def save_medusa(heads: MedusaHeads, directory: Path) -> None:
    """Write `config.json` and the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "format": _FORMAT,
        "hidden_size": heads.sizes.width,
        "num_heads": heads.sizes.num_heads,
    }
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
    heads = MedusaHeads(MedusaSizes(width, num_heads))
    heads.load_state_dict(dict(tensors))
    return heads.to(like.device, like.dtype).requires_grad_(False).eval()


@dataclass(frozen=True)
class MedusaDrafts:
    """A grower over `MedusaHeads`; remembers nothing between passes."""

    heads: MedusaHeads
    target: TargetModel
    kind = DraftKind.MEDUSA
    needs_hidden = False
    may_be_recorded = True
    steps_needed = 0

    def begin(self, seen: Seen, features: PromptFeatures) -> None:
        """Nothing of the prompt is needed."""

    def warm_up(self, shape: TreeShape, length: int) -> None:
        """Nothing is captured here."""

    @torch.no_grad()
    def grow(self, progress: BatchProgress, shape: TreeShape) -> DraftTree:
        """Branch as EAGLE-2 does, with scores that depend on the depth alone."""
        if progress.last is None:
            raise ValueError("Medusa heads start after the prefill")
        accepted = progress.last.accepted
        rows = torch.arange(len(progress.roots), device=progress.roots.device)
        seen = progress.last.hidden[rows, accepted.num_accepted]  # it has predicted the root
        shape = replace(shape, is_full_depth=False).cut(self._depth(progress, shape))
        drafted = self.target.action_tokens
        heads = self.heads(seen)[:, : shape.levels]
        ahead = self.target.logits(heads, drafted).log_softmax(dim=-1)

        def go_on(nodes: OpenNodes) -> Tensor:
            return ahead[:, nodes.depth, None].expand(-1, nodes.tokens.shape[1], -1)

        deepest = progress.length - 1 - progress.num_committed
        roots, first = progress.roots, ahead[:, 0]
        start = GrowthStart(self.kind, roots, first, deepest, drafted.first)
        return grow_tree(shape, start, go_on)

    def _depth(self, progress: BatchProgress, shape: TreeShape) -> int:
        """There are no more levels than heads, even where the shape is of full depth."""
        num_heads = self.heads.sizes.num_heads
        return num_heads if shape.is_full_depth else min(num_heads, progress.depth)
