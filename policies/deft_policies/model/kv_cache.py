"""The keys and values of a batch of sequences, in one tensor that is allocated once.

A slot holds everything one token leaves behind in a layer: its keys of every head, then its values.
So a layer appends with one copy, and keeping the accepted nodes of a draft tree is one gather and
one scatter over all layers. Knows nothing of trees or of who may attend to whom.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deft_policies.model.llama import LlamaSizes


@dataclass(frozen=True)
class Append:
    """Where the tokens of a pass go, and how far attention reads.

    `start` is set when every row appends at the same known slot; otherwise `slots` says where, as
    indices into row * length of the cache. The rows of the pass are those of the cache from
    `first_row` on.
    """

    read: int
    start: int = 0
    slots: Tensor | None = None  # [row * token] int64
    first_row: int = 0


class KVCache:
    """Slots of `num_rows` sequences, `data` [layer, row, slot, 2 * head, head_dim].

    Slots beyond what a caller reads may hold anything finite.
    """

    def __init__(self, sizes: "LlamaSizes", num_rows: int, length: int, like: Tensor) -> None:
        """Allocate with the device and dtype of `like`."""
        self.num_rows = num_rows
        self.length = length
        self._num_heads = sizes.num_kv_heads
        # Zeros, not garbage: a masked slot still enters 0 * value, and 0 * NaN is NaN. And not an
        # inference tensor: that could not be written to outside of inference mode.
        shape = (sizes.num_layers, num_rows, length, 2 * sizes.num_kv_heads, sizes.head_dim)
        with torch.inference_mode(False):
            self.data = torch.zeros(shape, device=like.device, dtype=like.dtype)
            self._flat = self.data.flatten(3).flatten(1, 2)

    def open(self, num_rows: int, num_tokens: int, append: Append) -> "CacheWindow":
        """The part of the cache that one pass writes and reads."""
        rows = slice(append.first_row, append.first_row + num_rows)
        read = self.data[:, rows, : append.read].transpose(2, 3)
        if append.slots is None:
            targets = self.data[:, rows, append.start : append.start + num_tokens]
        else:
            targets = self._flat
        return CacheWindow(
            keys=read[:, :, : self._num_heads].unbind(0),
            values=read[:, :, self._num_heads :].unbind(0),
            targets=targets.unbind(0),
            layers=self.data[:, rows].unbind(0),
            slots=append.slots,
        )

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy slots in every layer; both are [row, step] slots of their own row.

        All sources are read before anything is written, so the two may overlap.
        """
        rows = torch.arange(sources.shape[0], device=sources.device)[:, None] * self.length
        kept = self._flat.index_select(1, (sources + rows).flatten())
        self._flat.index_copy_(1, (destinations + rows).flatten(), kept)


@dataclass(frozen=True)
class CacheWindow:
    """Views of every layer, made once per pass. Keys and values include what is written later."""

    keys: tuple[Tensor, ...]  # [layer] of [row, head, slot, head_dim]
    values: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]  # [layer] of [row, token, 2 * head, head_dim], or of flat slots
    layers: tuple[Tensor, ...]  # [layer] of everything, [row, slot, 2 * head, head_dim]
    slots: Tensor | None

    def write(self, layer: int, keys_values: Tensor) -> None:
        """Append [row, token, 2 * head, head_dim] of one layer."""
        if self.slots is None:
            self.targets[layer].copy_(keys_values)
        else:
            flat = keys_values.flatten(2).flatten(0, 1)
            self.targets[layer].index_copy_(0, self.slots, flat)
