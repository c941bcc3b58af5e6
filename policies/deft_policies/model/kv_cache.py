"""The keys and values of a batch of sequences, in one tensor.

A slot holds everything one token leaves behind in a layer: its keys of every head, then its values.
So a layer appends with one copy, and keeping the accepted nodes of a draft tree is one gather and
one scatter over all layers. Knows nothing of trees or of who may attend to whom.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from deft_policies.model.llama import LlamaSizes

STRIP = 256  # slots: by so many at least a row's strip grows


@dataclass(frozen=True)
class Append:
    """Where the tokens of a pass go, and how far attention reads.

    `start` is set when every row appends at the same known slot; otherwise `slots` says where, as
    indices into row * slot of the cache. The rows of the pass are those of the cache from
    `first_row` on.
    """

    read: int
    start: int = 0
    slots: Tensor | None = None  # [row * token] int64
    first_row: int = 0


class KVCache:
    """The cached part of every row of a batch: one strip of slots each.

    A row's strip holds its prompt, then what was committed since, then the tree in flight. Strips
    grow all together, by doubling, when a row needs more: buckets, not blocks. Attention reads a
    strip as one tensor, on every device and in our own kernel; blocks would need a copy in every
    layer or another kernel, to save memory that a robot server, with few rows of at most some
    thousand positions, does not lack. Where steps are recorded nothing grows: the memory is set
    aside before, as what is recorded points to it.
    """

    def __init__(self, sizes: "LlamaSizes", like: Tensor) -> None:
        """Allocate with the device and dtype of `like`, as soon as room is reserved."""
        self._sizes, self._like = sizes, like
        self._allocate(0, 0)
        with torch.inference_mode(False):
            counters = torch.zeros(2, 0, dtype=torch.int64, device=like.device)
        # [row] each: committed slots, and the slot of the last pass's root.
        self.length, self.roots = counters
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.is_fixed = False

    @property
    def num_slots(self) -> int:
        """Of every row; those beyond what a caller reads may hold anything finite."""
        return self._data.shape[2]

    def _allocate(self, num_rows: int, num_slots: int) -> None:
        """Make `_data` [layer, row, slot, 2 * head, head_dim]."""
        sizes, like = self._sizes, self._like
        shape = (sizes.num_layers, num_rows, num_slots, 2 * sizes.num_kv_heads, sizes.head_dim)
        # Zeros, not garbage: a masked slot still enters 0 * value, and 0 * NaN is NaN. And not an
        # inference tensor: that could not be written to outside of inference mode.
        with torch.inference_mode(False):
            self._data = torch.zeros(shape, device=like.device, dtype=like.dtype)
            self._flat = self._data.flatten(3).flatten(1, 2)

    def fix(self, rows: int, slots: int) -> None:
        """Set memory aside that is not to move: what is recorded points to it."""
        self.reserve(rows, slots)
        self.is_fixed = True

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for so many rows of so many slots; what is cached stays."""
        old, num_rows = self._data, len(self.length)
        if rows <= num_rows and slots <= self.num_slots:
            return
        self.is_fixed = False
        if slots > self.num_slots:
            slots = max(slots + -slots % STRIP, 2 * self.num_slots)
        self._allocate(max(rows, num_rows), max(slots, self.num_slots))
        self._data[:, :num_rows, : old.shape[2]] = old
        missing = self._data.shape[1] - num_rows
        with torch.inference_mode(False):
            self.length = functional.pad(self.length, (0, missing))
            self.roots = functional.pad(self.roots, (0, missing))
        self._views = {}

    def counters(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """`length` and `roots` of some rows; the same views each time."""
        here = slice(first, stop)
        if (first, stop) not in self._views:
            self._views[first, stop] = (self.length[here], self.roots[here])
        return self._views[first, stop]

    def open(self, num_rows: int, num_tokens: int, append: Append) -> "CacheWindow":
        """The part of the cache that one pass writes and reads."""
        rows = slice(append.first_row, append.first_row + num_rows)
        num_heads = self._sizes.num_kv_heads
        read = self._data[:, rows, : append.read].transpose(2, 3)
        if append.slots is None:
            targets = self._data[:, rows, append.start : append.start + num_tokens]
        else:
            targets = self._flat
        return CacheWindow(
            keys=read[:, :, :num_heads].unbind(0),
            values=read[:, :, num_heads:].unbind(0),
            targets=targets.unbind(0),
            layers=self._data[:, rows].unbind(0),
            slots=append.slots,
        )

    def keep(self, path: Tensor, kept: Tensor | int, in_place: bool, first: int = 0) -> None:
        """Keep the slots of a path of the last pass and forget its other nodes.

        `path` is [row, step]: node indices from the root downwards, padded with anything; `kept`
        [row], or one number for all, says how many of them count, the root included. `in_place`
        says that nodes lie in the order of the path already, so that nothing is moved; only then
        may the rows begin at another than the first one.
        """
        length, roots = self.counters(first, first + path.shape[0])
        if path.shape[1] > 1 and not in_place:
            places = torch.arange(1, path.shape[1], device=path.device)
            self._move(roots[:, None] + path[:, 1:], roots[:, None] + places)
        torch.add(roots, kept, out=length)

    def _move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy slots [row, step] in every layer; all are read before anything is written."""
        rows = torch.arange(sources.shape[0], device=sources.device)[:, None] * self.num_slots
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
