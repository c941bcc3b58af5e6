"""A GPU's passes: fixed shapes over memory that never moves, captured once and replayed.

Only passes and prefills are captured: passes by (rows, width), prefills by (prompt length, riders).
Riders are guesses that are scored with the prompt, behind its last token. All captures read one
buffer of numbers and write one set of scores, sized for the largest. Row r of a pass is slot r of
the cache; rows without an answer in this round write behind the last position that an answer can
have.

Answers whose trees have at most 8 nodes share a pass, whatever their methods; wider ones share
another. So a round has two passes at most.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deft_policies.decoding.sampling import first_maximum
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.fused_attention import (
    ANSWER,
    CHUNK,
    MOST_DEEP,
    NUM_HEADER,
    ROOT,
    SLOT,
    TWO_WAY,
    WORD,
    FusedAttention,
)
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.kv_cache import CacheWindow, KVCache, prefill_mask, tree_mask
from deft_policies.model.llama import Attention, LlamaDecoder, added_mask
from deft_policies.model.passes import LlamaPasses
from deft_policies.model.sizes import LlamaSizes

if TYPE_CHECKING:
    from deft_policies.decoding.target import PassRow

NARROW = 8  # nodes of a tree that shares a pass with others, at most
WIDTHS = (1, NARROW, 16, 64, 128)  # nodes of a captured pass; others are padded to the next
_RIDERS = (0, NARROW, 64, 128)  # guesses behind a captured prompt
UNREAD = -1  # in place of a token that is still on the device
# Estimates of what captures take: kernels of a layer, bytes of each, queries of a narrow pass.
_NODES_OF_LAYER, _BYTES_OF_NODE, _FEW_QUERIES = 11, 10_000, 64
assert WIDTHS[-1] <= MOST_DEEP


def bucket(width: int, widths: Items[int] = WIDTHS) -> int:
    """The captured width that a tree of `width` nodes is padded to."""
    return next(captured for captured in widths if captured >= width)


def riders_of(widest: int) -> list[int]:
    """How many guesses behind a prompt are captured, for trees of up to `widest` nodes.

    No more than a pass has nodes: scores and slots have room for that.
    """
    most = bucket(widest)
    return [*(riders for riders in _RIDERS if riders < most), most]


@dataclass(frozen=True)
class Shape:
    """What is captured: a pass, or a prefill where `length` is not 0."""

    rows: int
    width: int
    length: int = 0
    keeps_hidden: bool = False  # of the prompt


def shapes_of(reserve: Reserve, widest: int, keeps_hidden: bool) -> list[Shape]:
    """Everything that is captured for trees of up to `widest` nodes.

    A head reads the hidden states of prompts. Without one a rule may, which is rare: its prefills
    are captured with the most riders alone.
    """
    widths = [size for size in WIDTHS if size <= bucket(widest)]
    passes = [Shape(rows, width) for rows in reserve.batches for width in widths]
    riders = riders_of(widest)
    prefills = [
        Shape(1, 1 + num, length, keeps_hidden) for length in reserve.lengths for num in riders
    ]
    if not keeps_hidden:
        prefills += [Shape(1, 1 + riders[-1], length, True) for length in reserve.lengths]
    return [*passes, *prefills]


@dataclass(frozen=True)
class Layout:
    """How much memory captured passes have, for answers of up to `num_tokens` tokens."""

    reserve: Reserve
    widest: int
    num_tokens: int

    @property
    def num_slots(self) -> int:
        """Answers at a time."""
        return self.reserve.batches[0]

    @property
    def longest(self) -> int:
        """Positions of an answer with its prompt and a tree behind it."""
        return self.reserve.lengths[-1] + self.num_tokens + bucket(self.widest)

    @property
    def num_positions(self) -> int:
        """Of a slot: behind the longest answer rows write that have none."""
        return self.longest + bucket(self.widest)

    @property
    def num_nodes(self) -> int:
        """Nodes whose scores are kept, of a narrow and a wide pass."""
        return (NARROW + bucket(self.widest)) * self.num_slots

    def bytes_of(self, sizes: LlamaSizes, itemsize: int, num_graphs: int) -> dict[str, int]:
        """Bytes that are allocated besides weights of `itemsize` bytes a number, by purpose."""
        token = 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * itemsize
        scores = sizes.vocabulary * 4 + sizes.width * itemsize + 32
        prompts = 2 * self.num_positions * sizes.width * itemsize
        widest = max(self.longest, self.num_nodes)
        inner = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
        of_token = itemsize * (4 * sizes.width + 2 * inner + 3 * sizes.mlp_width)
        # Where queries are few the attention leaves a part for every chunk of positions.
        sums = (
            4 * (2 + self.num_positions // CHUNK) * _FEW_QUERIES * sizes.num_heads * sizes.head_dim
        )
        nodes = num_graphs * _NODES_OF_LAYER * sizes.num_layers * _BYTES_OF_NODE
        return {
            "keys and values": self.num_slots * self.num_positions * token,
            "scores": self.num_nodes * scores + prompts,
            "workspaces": widest * of_token + sums + self.longest * sizes.vocabulary // 8,
            "graphs": nodes,
        }


Header = tuple[int, int, int, int, int]  # see `fused_attention`


def words_of(width: int) -> int:
    """Words of ancestors of a node in a tree of so many."""
    return -(-width // WORD)


@dataclass(frozen=True)
class _Rows:
    """What the host has uploaded about the rows of a pass, on the device."""

    numbers: Tensor  # [row, ..]: a header, then tokens, depths and ancestors of each node
    width: int  # nodes of a row
    words: int  # of ancestors, of a node
    positions: Tensor  # [row, token], for the rotary embedding; tokens are the nodes in a pass
    index: Tensor  # [row * token], where keys and values go, among all positions of all slots
    # Of a prefill:
    nodes: Tensor  # [node], which of its tokens are the nodes
    last_seen: Tensor  # [token], the last position that it sees, but for ancestors

    def header(self, which: int) -> Tensor:
        """[row]: see `fused_attention`."""
        return self.numbers[:, which]

    @property
    def tokens(self) -> Tensor:
        """[row, node]."""
        return self.numbers[:, NUM_HEADER : NUM_HEADER + self.width]

    @property
    def ancestors(self) -> Tensor:
        """bool [row, node, node]: the column lies on the row's path, itself included."""
        bits = self.numbers[:, NUM_HEADER + 2 * self.width :]
        shifts = torch.arange(WORD, device=bits.device)
        spread = (bits.reshape(len(bits), self.width, self.words, 1) >> shifts) & 1
        return spread.flatten(2)[:, :, : self.width] > 0


class CapturedPasses:
    """Replays passes of fixed shapes over one cache."""

    def __init__(
        self,
        decoder: LlamaDecoder,
        passes: LlamaPasses,
        runner: StepRunner,
        cache: KVCache,
        widest: int,
        num_tokens: int,
    ) -> None:
        """Set everything aside: `num_tokens` is what an answer may have at most."""
        assert runner.reserve is not None
        self._decoder, self._passes, self._runner = decoder, passes, runner
        self.layout = layout = Layout(runner.reserve, widest, num_tokens)
        self.reserve, self.widest = runner.reserve, bucket(widest)
        self.keeps_hidden = False  # whether every prefill keeps the hidden states of its prompt
        self.cache, self.num_slots = cache, layout.num_slots
        self._longest = layout.longest
        cache.fix(self.num_slots, layout.num_positions, self)
        self._prompts: dict[int, int] = {}  # positions of the prompt that was read into a slot
        self._num_filled = 0  # positions of the last prompt
        weight = decoder.embedding.weight
        num_nodes = layout.num_nodes
        num_hidden = self.reserve.lengths[-1] + self.widest
        with torch.inference_mode(False):
            of_passes = self.num_slots * (_size_of_row(self.widest) + 2 * self.widest)
            width = 1 + riders_of(self.widest)[-1]
            of_prefills = _size_of_row(width) + 3 * num_hidden + width
            size = max(of_passes, of_prefills)
            self._numbers = torch.zeros(size, dtype=torch.int64, device=weight.device)
            self._embeds = weight.new_zeros(num_hidden, weight.shape[1])
            self.logits = torch.zeros(num_nodes, decoder.sizes.vocabulary, device=weight.device)
            self.hidden = weight.new_zeros(num_nodes, weight.shape[1])
            self.prompt = weight.new_zeros(num_hidden, weight.shape[1])  # hidden states
            self.best = torch.zeros(num_nodes, dtype=torch.int64, device=weight.device)
            self.for_host = torch.zeros(num_nodes, 3, dtype=torch.float64, device=weight.device)
            # With those of other layers in front; None where they are not read.
            self.states: Tensor | None = None
            self.prompt_states: Tensor | None = None
            if num_layers := len(passes.read_layers):
                width = (1 + num_layers) * weight.shape[1]
                self.states = weight.new_zeros(num_nodes, width)
                self.prompt_states = weight.new_zeros(num_hidden, width)

    def run_passes(self, rows: Items[PassRow]) -> list[int]:
        """Run a round; where node 0 of each row lies in the scores."""
        narrow = [row for row in rows if row.tree.num_nodes <= NARROW]
        wide = [row for row in rows if row.tree.num_nodes > NARROW]
        first: dict[int, int] = {}
        for group, at in ((narrow, 0), (wide, NARROW * self.num_slots)):
            if group:
                width = bucket(max(row.tree.num_nodes for row in group))
                self._run_pass(group, width, at)
                first |= {row.slot: at + row.slot * width for row in group}
        return [first[row.slot] for row in rows]

    def _run_pass(self, rows: Items[PassRow], width: int, at: int) -> None:
        num_rows = bucket(1 + max(row.slot for row in rows), self.reserve.batches[::-1])
        self._upload(*self._numbers_of(rows, num_rows, width))
        key = Shape(num_rows, width)
        self._runner.run((self, key, at), partial(self._pass, num_rows, width, at), ())

    def _numbers_of(
        self, rows: Items[PassRow], num_rows: int, width: int
    ) -> tuple[NDArray[np.int64], ...]:
        """Numbers, positions and index of a pass. Slots without an answer write behind the longest
        one.
        """
        numbers = np.tile(_blank(width, self._longest), (num_rows, 1))
        numbers[:, SLOT] = range(num_rows)
        positions = np.zeros((num_rows, width), np.int64)
        for row in rows:
            num_prompt = self._prompts.get(row.slot, row.start)
            header = (row.start, row.number, num_prompt, row.slot, 0)
            _encode(numbers[row.slot], header, row.tree, width)
            positions[row.slot] = row.start + _depths(numbers[row.slot], width)
        in_slot = numbers[:, ROOT, None] + np.arange(width)
        index = numbers[:, SLOT, None] * self.cache.num_positions + in_slot
        return numbers, positions, index

    def _upload(self, *numbers: NDArray[np.int64]) -> None:
        """Copy to the device, one behind the other, in one copy."""
        staged = torch.from_numpy(np.concatenate([one.reshape(-1) for one in numbers]))
        if self._numbers.is_cuda:
            staged = staged.pin_memory()
        self._numbers[: len(staged)].copy_(staged, non_blocking=True)

    def _read_rows(self, num_rows: int, width: int, num_tokens: int = 0) -> _Rows:
        """What was uploaded: of a pass, or of a prefill of `num_tokens` with its guesses."""
        of_row, of_prefill = _size_of_row(width), (0, 0)
        if num_tokens:
            of_prefill = width, num_tokens
        else:
            num_tokens = num_rows * width
        sizes = [num_rows * of_row, num_tokens, num_tokens, *of_prefill]
        parts = self._numbers[: sum(sizes)].split_with_sizes(sizes)
        numbers, positions, index, nodes, last_seen = parts
        return _Rows(
            numbers.view(num_rows, of_row),
            width,
            words_of(width),
            positions.view(num_rows, -1),
            index,
            nodes,
            last_seen,
        )

    def _pass(self, num_rows: int, width: int, at: int) -> tuple[()]:
        """One pass over slots 0 to `num_rows`, whose scores are written from node `at` on."""
        rows = self._read_rows(num_rows, width)
        tokens = rows.tokens
        if width == 1:  # a token that the host has not read is that of the last such pass
            tokens = torch.where(tokens == UNREAD, self.best[:num_rows, None], tokens)
        embeds = self._decoder.embedding(tokens)
        attention: FusedAttention | Attention | None = self._fused(rows, embeds)
        if attention is None:
            seen = tree_mask(rows.header(ROOT), rows.ancestors, self.cache.num_positions)
            strips = self.cache.data[:, :num_rows].transpose(2, 3)
            num_heads = self._decoder.sizes.num_kv_heads
            window = CacheWindow(
                targets=self.cache.flat.unbind(0),
                keys=strips[:, :, :num_heads].unbind(0),
                values=strips[:, :, num_heads:].unbind(0),
                index=rows.index,
            )
            attention = self._plain(embeds, rows.positions, window, seen)
        states: list[Tensor] = []
        hidden = self._passes.run(embeds.flatten(0, 1), attention, states=states)
        nodes = slice(at, at + num_rows * width)
        self._write(nodes, hidden, rows.header(ANSWER))
        if self.states is not None:
            torch.cat([*states, hidden], dim=1, out=self.states[nodes])
        return ()

    def run_prefill(self, row: PassRow) -> Tensor | None:
        """Run one prompt with its guesses; its scores begin at node 0.

        Returns the hidden states of the prompt where they are kept: the next prefill overwrites
        them.
        """
        assert row.prompt is not None
        prompt, num_guesses = row.prompt, row.tree.num_nodes - 1
        length = bucket(prompt.length, self.reserve.lengths)
        counts = riders_of(self.widest)
        riders = bucket(num_guesses, counts)
        if row.keeps_hidden and not self.keeps_hidden:
            riders = counts[-1]
        header = (prompt.length - 1, row.number, prompt.length, row.slot, prompt.two_way)
        self._upload(*self._numbers_of_prefill(header, row.tree, length, 1 + riders))
        self._prompts[row.slot] = prompt.length
        self._embeds[: prompt.length].copy_(prompt.embeds)
        if prompt.length < self._num_filled:
            # What a longer prompt has left may not be finite, and 0 * NaN is NaN.
            self._embeds[prompt.length : self._num_filled].zero_()
        self._num_filled = prompt.length
        keeps = row.keeps_hidden or self.keeps_hidden
        key = Shape(1, 1 + riders, length, keeps)
        self._runner.run((self, key), partial(self._prefill, length, riders, keeps), ())
        return self.prompt[: prompt.length] if keeps else None

    def _numbers_of_prefill(
        self, header: Header, tree: DraftTree, length: int, width: int
    ) -> tuple[NDArray[np.int64], ...]:
        """Numbers, positions, index, nodes and what is seen, for a prompt padded to `length`.

        Guesses lie directly behind the prompt, and padding behind them, where nothing sees it.
        """
        root, slot, two_way = header[ROOT], header[SLOT], header[TWO_WAY]
        numbers = np.zeros(_size_of_row(width), np.int64)
        _encode(numbers, header, tree, width)
        tokens = np.arange(length + width - 1)
        nodes = np.arange(root, root + width)
        positions, last_seen = tokens.copy(), tokens.copy()
        positions[nodes] = root + _depths(numbers, width)
        last_seen[nodes] = root
        last_seen[:two_way] = two_way - 1
        return numbers, positions, slot * self.cache.num_positions + tokens, nodes, last_seen

    def _prefill(self, length: int, riders: int, keeps_hidden: bool) -> tuple[()]:
        """A prompt of up to `length` positions with its guesses."""
        width, num_tokens = 1 + riders, length + riders
        rows = self._read_rows(1, width, num_tokens)
        embeds = self._embeds[:num_tokens].clone()
        if riders:
            guesses = self._decoder.embedding(rows.tokens[0, 1:])
            embeds.index_copy_(0, rows.nodes[1:], guesses)
        embeds = embeds[None]
        last: FusedAttention | Attention | None = None
        attention: FusedAttention | Attention | None
        attention = fused = self._fused(rows, embeds, is_prefill=True)
        if fused is None:
            seen = prefill_mask(rows.last_seen)
            if riders:
                seen[0, 0, rows.nodes[1:, None], rows.nodes] = rows.ancestors[0, 1:]
            window = CacheWindow(
                targets=self.cache.flat.unbind(0),
                index=rows.index,
                cache=self.cache,
                slots=rows.header(SLOT),
                read=num_tokens,
            )
            attention = plain = self._plain(embeds, rows.positions, window, seen)
            if not keeps_hidden:
                last = plain.of_rows_out(rows.nodes[None])
        elif not keeps_hidden:
            last = fused.of_nodes(rows.nodes)
        assert attention is not None
        states: list[Tensor] = []
        hidden = self._passes.run(embeds.flatten(0, 1), attention, last, states)
        all_states = None if self.states is None else torch.cat([*states, hidden], dim=1)
        if keeps_hidden:
            self.prompt[:num_tokens].copy_(hidden)
            hidden = hidden[rows.nodes]
            if self.prompt_states is not None and all_states is not None:
                self.prompt_states[:num_tokens].copy_(all_states)
                all_states = all_states[rows.nodes]
        self._write(slice(0, width), hidden, rows.header(ANSWER))
        if self.states is not None and all_states is not None:
            self.states[:width].copy_(all_states)
        return ()

    def _fused(
        self, rows: _Rows, embeds: Tensor, is_prefill: bool = False
    ) -> FusedAttention | None:
        """The attention of a pass by fused kernels; None where there are none."""
        kernels, sizes = self._decoder.kernels, self._decoder.sizes
        if kernels is None:
            return None
        cos, sin = self._decoder.rotary(rows.positions, embeds)
        rotation = cos.reshape(-1, sizes.head_dim), sin.reshape(-1, sizes.head_dim)
        data = self.cache.data
        return FusedAttention(
            sizes, kernels, rotation, data, rows.index, rows.numbers, rows.width, is_prefill
        )

    def _plain(
        self, embeds: Tensor, positions: Tensor, window: CacheWindow, seen: Tensor
    ) -> Attention:
        """The same by PyTorch's own operations."""
        cos, sin = self._decoder.rotary(positions, embeds)
        mask = added_mask(seen, embeds.dtype)
        return Attention(self._decoder.sizes, cos, sin, mask, window=window)

    def _write(self, nodes: slice, hidden: Tensor, answers: Tensor) -> None:
        """Write the scores of nodes, which are those of answers [row]."""
        self.hidden[nodes].copy_(hidden)
        logits, best, for_host = self.logits[nodes], self.best[nodes], self.for_host[nodes]
        logits.copy_(self._passes.score(hidden))
        likeliest, sums, of_answers = for_host.unbind(1)
        likeliest.copy_(first_maximum(logits, out=best))
        sums.copy_(logits.sum(dim=1))
        of_answers.view(len(answers), -1).copy_(answers[:, None])

    def capture(self) -> None:
        """Capture every pass and prefill, over rows without an answer."""
        shapes = shapes_of(self.reserve, self.widest, self.keeps_hidden)
        for shape in shapes:
            self._numbers.zero_()
            if shape.length:
                header = (shape.length - 1, 0, shape.length, 0, 0)
                self._upload(*self._numbers_of_prefill(header, _BLANK, shape.length, shape.width))
                step = partial(self._prefill, shape.length, shape.width - 1, shape.keeps_hidden)
                self._runner.run((self, shape), step, ())
                continue
            self._upload(*self._numbers_of((), shape.rows, shape.width))
            at = 0 if shape.width <= NARROW else NARROW * self.num_slots
            step = partial(self._pass, shape.rows, shape.width, at)
            self._runner.run((self, shape, at), step, ())


_BLANK = DraftTree.of_committed([0])


def _size_of_row(width: int) -> int:
    """Numbers of a row with so many nodes."""
    return NUM_HEADER + width * (2 + words_of(width))


@lru_cache(maxsize=16)
def _blank(width: int, behind: int) -> NDArray[np.int64]:
    """The numbers of a row without an answer, whose nodes are written to position `behind`."""
    numbers = np.zeros(_size_of_row(width), np.int64)
    _encode(numbers, (behind, 0, 0, 0, 0), _BLANK, width)
    return numbers


def _depths(numbers: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Those of the nodes of a row, in its numbers."""
    return numbers[NUM_HEADER + width : NUM_HEADER + 2 * width]


def _encode(out: NDArray[np.int64], header: Header, tree: DraftTree, width: int) -> None:
    """Write the numbers of a row. Nodes that pad it see node 0 and themselves."""
    num_nodes, num_words, parents = tree.num_nodes, words_of(width), tree.parents
    out[:NUM_HEADER] = header
    tokens = out[NUM_HEADER : NUM_HEADER + width]
    node_depths = _depths(out, width)
    of_nodes = out[NUM_HEADER + 2 * width :].reshape(width, num_words)
    tokens[:num_nodes], tokens[num_nodes:] = tree.tokens, 0
    node_depths[num_nodes:] = 1  # of nodes that pad
    of_nodes[num_nodes:] = _padding(width)[num_nodes:]
    if tree.is_chain:
        node_depths[:num_nodes] = range(num_nodes)
        of_nodes[:num_nodes] = _chain(width)[:num_nodes]
        return
    depths, ancestors = [0], [1]
    for node in range(1, num_nodes):
        parent = parents[node]
        depths.append(depths[parent] + 1)
        ancestors.append(ancestors[parent] | 1 << node)
    node_depths[:num_nodes] = depths
    of_nodes[:num_nodes] = _words(ancestors, num_words)


def _words(ancestors: list[int], num_words: int) -> NDArray[np.int64]:
    """An integer of ancestors for each node as [node, word]."""
    encoded = b"".join([ancestor.to_bytes(8 * num_words, "little") for ancestor in ancestors])
    return np.frombuffer(encoded, "<i8").reshape(len(ancestors), num_words)


@lru_cache(maxsize=16)
def _padding(width: int) -> NDArray[np.int64]:
    """Ancestors of nodes that pad: node 0 and themselves, [node, word]."""
    return _words([1 | 1 << node for node in range(width)], words_of(width))


@lru_cache(maxsize=16)
def _chain(width: int) -> NDArray[np.int64]:
    """Ancestors of the nodes of a chain, [node, word]."""
    return _words([(2 << node) - 1 for node in range(width)], words_of(width))
