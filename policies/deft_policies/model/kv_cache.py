"""The keys and values of a batch of sequences, in one tensor.

A slot holds everything one token leaves behind in a layer: its keys of every head, then its values.
So a layer appends with one copy, and keeping the accepted nodes of a draft tree is one gather and
one scatter over all layers.

A row's sequence is its prompt, then what was committed since, then the nodes of the tree in flight.
Rows have their own lengths, so the same node lies in a different slot in each. Where tokens lie and
what each may see is index arithmetic, of which the cache itself knows nothing.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from deft_policies.model.sizes import LlamaSizes

STRIP = 256  # slots: by so many at least a row's strip grows


class KVCache:
    """The cached part of every row of a batch: one strip of slots each.

    A row's strip holds its prompt, then what was committed since, then the tree in flight. Strips
    grow all together, by doubling, when a row needs more: buckets, not blocks. Attention reads a
    strip as one tensor, on every device and in our own kernel; blocks would need a copy in every
    layer or another kernel, to save memory that a robot server, with few rows of at most some
    thousand positions, does not lack. Where steps are recorded nothing grows: the memory is set
    aside before, as what is recorded points to it.
    """

    def __init__(self, sizes: "LlamaSizes", like: Tensor, by_slots: bool = False) -> None:
        """Allocate with the device and dtype of `like`, as soon as room is reserved.

        `by_slots`: whoever writes wants every slot by its number, as fused kernels do.
        """
        self._sizes, self._like, self._by_slots = sizes, like, by_slots
        self._allocate(0, 0)
        with torch.inference_mode(False):
            # [row], committed slots: where the root of the pass in flight lies.
            self.length = torch.zeros(0, dtype=torch.int64, device=like.device)
        self._views: dict[tuple[int, int], Tensor] = {}
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
        self._views = {}

    def clear(self, rows: slice) -> None:
        """Write zeros: NaN that rows left behind would reach later ones through any mask."""
        self._data[:, rows].zero_()

    def lengths(self, first: int, stop: int) -> Tensor:
        """`length` of some rows; the same view each time."""
        if (first, stop) not in self._views:
            self._views[first, stop] = self.length[first:stop]
        return self._views[first, stop]

    def open(
        self,
        num_rows: int,
        num_tokens: int,
        read: int,
        start: int = 0,
        slots: Tensor | None = None,
        first_row: int = 0,
    ) -> "CacheWindow":
        """What one pass writes and reads: the rows from `first_row` on, `read` slots of each.

        Every row appends at the same known slot `start`, or `slots` [row, token] say where.
        """
        rows, num_heads = slice(first_row, first_row + num_rows), self._sizes.num_kv_heads
        seen = self._data[:, rows, :read].transpose(2, 3)
        if slots is None and self._by_slots:
            every = start + torch.arange(num_tokens, device=self._data.device)
            slots = every.expand(num_rows, -1)
        if slots is None:
            targets = self._data[:, rows, start : start + num_tokens]
        else:
            targets, slots = self._flat, (slots + self._strips(num_rows, first_row)).flatten()
        return CacheWindow(
            keys=seen[:, :, :num_heads].unbind(0),
            values=seen[:, :, num_heads:].unbind(0),
            targets=targets.unbind(0),
            layers=self._data[:, rows].unbind(0),
            slots=slots,
        )

    def keep(self, path: Tensor, kept: Tensor | int, in_place: bool, first: int = 0) -> None:
        """Keep the slots of a path of the last pass and forget its other nodes.

        `path` is [row, step]: node indices from the root downwards, padded with anything; `kept`
        [row], or one number for all, says how many of them count, the root included. `in_place`
        says that nodes lie in the order of the path already, so that nothing is moved; only then
        may the rows begin at another than the first one.
        """
        length = self.lengths(first, first + path.shape[0])
        if path.shape[1] > 1 and not in_place:
            places = torch.arange(1, path.shape[1], device=path.device)
            here = length[:, None] + self._strips(path.shape[0])
            kept_slots = self._flat.index_select(1, (here + path[:, 1:]).flatten())
            self._flat.index_copy_(1, (here + places).flatten(), kept_slots)
        length.add_(kept)

    def _strips(self, num_rows: int, first_row: int = 0) -> Tensor:
        """Where rows begin in row * slot, [row, 1]."""
        rows = torch.arange(first_row, first_row + num_rows, device=self._data.device)
        return rows[:, None] * self.num_slots


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


def prefill_layout(lengths: Tensor, depths: Tensor, padded: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out prompts [row] of `padded` positions and trees of depths [row, node].

    A tree's guesses are directly behind the prompt, whatever its padding. Sequence position and
    cache slot are the same thing in a prefill. Padding ends up behind the guesses, where causality
    hides it.

    Returns sources [row, slot], indices into (prompt positions, then nodes 1...), rotary positions
    [row, slot], and the slots of nodes [row, node]; node 0 is the last prompt token.
    """
    num_guesses = depths.shape[1] - 1
    slots = torch.arange(padded + num_guesses, device=lengths.device)[None, :]
    if num_guesses == 0:
        every = slots.expand(len(lengths), -1)
        return every, every, lengths[:, None] - 1
    behind = slots - lengths[:, None]  # 0 is the first guess
    is_guess = (behind >= 0) & (behind < num_guesses)
    is_padding = behind >= num_guesses
    sources = torch.where(is_guess, padded + behind, slots - is_padding * num_guesses)
    node = (behind + 1).clamp(0, num_guesses)
    guessed = lengths[:, None] - 1 + depths.gather(1, node)
    positions = torch.where(is_guess, guessed, slots)
    return sources, positions, tree_slots(lengths - 1, depths.shape[1])


def prefill_mask(node_slots: Tensor, ancestors: Tensor, num_slots: int) -> Tensor:
    """[row, 1, slot, slot]: causal, but a guess sees only its ancestors among the guesses."""
    slots = torch.arange(num_slots, device=ancestors.device)
    mask = (slots[:, None] >= slots).repeat(len(ancestors), 1, 1)
    rows = torch.arange(len(ancestors), device=ancestors.device)[:, None, None]
    mask[rows, node_slots[:, 1:, None], node_slots[:, None, :]] = ancestors[:, 1:]
    return mask.unsqueeze(1)


def tree_slots(roots: Tensor, num_nodes: int) -> Tensor:
    """Slots [row, node] of a tree whose root lies at `roots` [row]."""
    return roots[:, None] + torch.arange(num_nodes, device=roots.device)


def tree_mask(roots: Tensor, ancestors: Tensor, read: int) -> Tensor:
    """[row, 1, node, slot]: a node sees every slot before the root, and its ancestors."""
    num_nodes = ancestors.shape[1]
    behind = torch.arange(read, device=roots.device) - roots[:, None]  # 0 is the root
    is_node = (behind >= 0) & (behind < num_nodes)
    column = behind.clamp(0, num_nodes - 1)[:, None, :].expand(-1, num_nodes, -1)
    seen = ancestors.gather(2, column) & is_node[:, None, :]
    return (seen | (behind < 0)[:, None, :]).unsqueeze(1)


def pad_ancestors(ancestors: Tensor, num_nodes: int) -> Tensor:
    """[row, node, node] of a tree with more nodes behind, which see the root and themselves."""
    missing = num_nodes - ancestors.shape[1]
    padded = functional.pad(ancestors, (0, missing, 0, missing))
    padded[:, -missing:, 0] = True
    padded[:, -missing:, -missing:] |= torch.eye(missing, dtype=torch.bool, device=ancestors.device)
    return padded


def is_chain(parents: Tensor) -> bool:
    """True if every node hangs on the one before it. Reads the tensor: cheap on a CPU only."""
    expected = torch.arange(-1, parents.shape[1] - 1, device=parents.device)
    return bool(torch.equal(parents, expected.expand_as(parents)))
