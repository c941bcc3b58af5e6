"""The keys and values of a batch of sequences, in one tensor that is allocated once.

A slot holds everything one token leaves behind in a layer: its keys and its values of every head,
side by side. So a layer appends with one copy, and keeping the accepted nodes of a draft tree is
one gather and one scatter over all layers. Knows nothing of trees or of who may attend to whom.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheSizes:
    """What one token leaves behind."""

    num_layers: int
    num_heads: int
    head_dim: int


class KVCache:
    """Slots of `num_rows` sequences, `data` [layer, row, slot, 2, head, head_dim].

    Slots beyond what a caller reads may hold anything finite.
    """

    def __init__(self, sizes: CacheSizes, num_rows: int, length: int, like: Tensor) -> None:
        """Allocate with the device and dtype of `like`."""
        self.sizes = sizes
        self.num_rows = num_rows
        self.length = length
        # Zeros, not garbage: a masked slot still enters 0 * value, and 0 * NaN is NaN.
        shape = (sizes.num_layers, num_rows, length, 2, sizes.num_heads, sizes.head_dim)
        self.data = torch.zeros(shape, device=like.device, dtype=like.dtype)
        self._flat = self.data.flatten(3).flatten(1, 2)

    def fits(self, num_rows: int, length: int) -> bool:
        """Whether a batch of these sizes has room."""
        return num_rows <= self.num_rows and length <= self.length

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return int(self.data.nbytes)

    def layer(self, index: int, num_rows: int, append: "Append") -> "LayerCache":
        """One layer's window for a pass."""
        return LayerCache(self.data[index, :num_rows], self._flat[index], append)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy slots in every layer; both are [row, step] slots of their own row.

        All sources are read before anything is written, so the two may overlap.
        """
        rows = torch.arange(sources.shape[0], device=sources.device)[:, None] * self.length
        kept = self._flat.index_select(1, (sources + rows).flatten())
        self._flat.index_copy_(1, (destinations + rows).flatten(), kept)


@dataclass(frozen=True)
class Append:
    """Where the tokens of a pass go, and how far attention reads.

    `start` is set when every row appends at the same known slot; otherwise `slots` says where, as
    indices into rows * length, row by row. `read` slots are attended to.
    """

    read: int
    start: int | None = None
    slots: Tensor | None = None  # [row * token] int64


@dataclass(frozen=True)
class LayerCache:
    """One layer of the cache during one pass."""

    data: Tensor  # [row, slot, 2, head, head_dim]
    flat: Tensor  # [row * slot, 2 * head * head_dim]
    where: Append

    def append(self, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        """Write [row, token, 2, head, head_dim]; return keys and values, [row, slot, head, ...]."""
        where = self.where
        if where.start is not None:
            stop = where.start + keys_values.shape[1]
            self.data[:, where.start : stop].copy_(keys_values)
        elif where.slots is not None:
            self.flat.index_copy_(0, where.slots, keys_values.flatten(2).flatten(0, 1))
        window = self.data[:, : where.read]
        return window[:, :, 0], window[:, :, 1]
