"""The keys and values of a pool of sequences, in one tensor, and where a pass writes and reads.

A slot is the place of one sequence; a position is the place of one token in it. A position holds
everything that a token leaves behind in a layer: its keys of every head, then its values. So a
layer appends with one copy, and the accepted nodes of all draft trees are kept with one gather and
one scatter over all layers.

The cache knows nothing of lengths: the host does, and says where a pass begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deft_policies.model.staging import to_device

if TYPE_CHECKING:
    from deft_policies.model.sizes import LlamaSizes

STRIP = 256  # positions: by so many at least a slot grows

Move = tuple[int, int, int]  # slot, and the positions from and to


class KVCache:
    """Memory for a pool of slots, each a strip of positions.

    Strips grow all together, by doubling, when a sequence needs more: buckets, not blocks.
    Attention reads a strip as one tensor, on every device and in our own kernel; blocks would need
    a copy in every layer or another kernel, to save memory that a robot server, with few sequences
    of at most some thousand positions, does not lack. Where passes are captured nothing grows: the
    memory is set aside before, because what is captured points to it.
    """

    def __init__(self, sizes: "LlamaSizes", like: Tensor) -> None:
        """Allocate with the device and dtype of `like`, as soon as room is reserved."""
        self._sizes, self._like = sizes, like
        self.captured: object = None  # the passes that point to it, where any were captured
        self._allocate(0, 0)

    @property
    def num_slots(self) -> int:
        """Sequences that there is room for."""
        return int(self.data.shape[1])

    @property
    def num_positions(self) -> int:
        """Of every slot; those beyond what a pass reads may hold anything finite."""
        return int(self.data.shape[2])

    def _allocate(self, slots: int, positions: int) -> None:
        """Make `data` [layer, slot, position, 2 * head, head_dim]."""
        sizes, like = self._sizes, self._like
        shape = (sizes.num_layers, slots, positions, 2 * sizes.num_kv_heads, sizes.head_dim)
        # Zeros, not garbage: a masked position still enters 0 * value, and 0 * NaN is NaN. And not
        # an inference tensor: that could not be written to outside of inference mode.
        with torch.inference_mode(False):
            self.data = torch.zeros(shape, device=like.device, dtype=like.dtype)
            self.flat = self.data.flatten(3).flatten(1, 2)  # [layer, slot * position, ...]

    def fix(self, slots: int, positions: int, captured: object) -> None:
        """Set memory aside that is not to move: what is captured points to it."""
        self._allocate(slots, positions)
        self.captured = captured

    def reserve(self, slots: int, positions: int) -> None:
        """Make room for so many slots of so many positions; what is cached stays."""
        if slots <= self.num_slots and positions <= self.num_positions:
            return
        if self.captured is not None:
            raise RuntimeError(
                f"captured passes point to {self.num_slots} slots of {self.num_positions} "
                f"positions; {slots} of {positions} were asked for"
            )
        old = self.data
        if positions > self.num_positions:
            positions = max(positions + -positions % STRIP, 2 * self.num_positions)
        self._allocate(max(slots, self.num_slots), max(positions, self.num_positions))
        self.data[:, : old.shape[1], : old.shape[2]] = old

    def clear(self, slot: int) -> None:
        """Forget what a sequence has left, which may not be finite."""
        self.data[:, slot] = 0

    def keep(self, moves: Sequence[Move]) -> None:
        """Move tokens to other positions of their slots, all at once: reads come before writes."""
        if not moves:
            return
        room = self.num_positions
        numbers = [(slot * room + source, slot * room + target) for slot, source, target in moves]
        sources, targets = to_device(numbers, self.data.device, torch.int64).unbind(1)
        self.flat.index_copy_(1, targets, self.flat.index_select(1, sources))

    def open_same(self, slots: slice, start: int, num_tokens: int) -> "CacheWindow":
        """Slots side by side, each appending at the same position; they see all up to there."""
        strips = self.data[:, slots]
        seen = strips[:, :, : start + num_tokens].transpose(2, 3)
        num_heads = self._sizes.num_kv_heads
        return CacheWindow(
            keys=seen[:, :, :num_heads].unbind(0),
            values=seen[:, :, num_heads:].unbind(0),
            targets=strips[:, :, start : start + num_tokens].unbind(0),
        )

    def open_at(self, slots: Tensor, positions: Tensor, read: int) -> "CacheWindow":
        """Any slots [row], appending at positions [row, token]; they see the first `read`."""
        index = (slots[:, None] * self.num_positions + positions).flatten()
        return CacheWindow(
            targets=self.flat.unbind(0), index=index, cache=self, slots=slots, read=read
        )


@dataclass(frozen=True)
class CacheWindow:
    """What one pass writes and reads of every layer. What is read includes what was written."""

    targets: tuple[Tensor, ...]  # [layer] of [row, token, 2 * head, head_dim], or of all positions
    keys: tuple[Tensor, ...] = ()  # [layer] of [row, head, position, head_dim]
    values: tuple[Tensor, ...] = ()
    # Where slots are given by their numbers:
    index: Tensor | None = None  # [row * token], of all positions
    cache: KVCache | None = None
    slots: Tensor | None = None  # [row]
    read: int = 0

    def write(self, layer: int, keys_values: Tensor) -> None:
        """Append [row, token, 2 * head, head_dim] of one layer."""
        if self.index is None:
            self.targets[layer].copy_(keys_values)
        else:
            flat = keys_values.flatten(2).flatten(0, 1)
            self.targets[layer].index_copy_(0, self.index, flat)

    def seen(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [row, head, position, head_dim] of one layer."""
        if self.cache is None:
            return self.keys[layer], self.values[layer]
        assert self.slots is not None
        strips = self.cache.data[layer, :, : self.read].index_select(0, self.slots)
        keys, values = strips.transpose(1, 2).chunk(2, dim=1)
        return keys, values


def prefill_mask(last_seen: Tensor) -> Tensor:
    """[1, 1, token, position]: every token sees the positions up to `last_seen` [token]."""
    positions = torch.arange(len(last_seen), device=last_seen.device)
    return (positions <= last_seen[:, None])[None, None]


def tree_mask(roots: Tensor, ancestors: Tensor, read: int) -> Tensor:
    """[row, 1, node, position]: a node sees every position before node 0, and its ancestors."""
    num_nodes = ancestors.shape[1]
    behind = torch.arange(read, device=roots.device) - roots[:, None]  # 0 is node 0
    is_node = (behind >= 0) & (behind < num_nodes)
    column = behind.clamp(0, num_nodes - 1)[:, None, :].expand(-1, num_nodes, -1)
    seen = ancestors.gather(2, column) & is_node[:, None, :]
    return (seen | (behind < 0)[:, None, :]).unsqueeze(1)
