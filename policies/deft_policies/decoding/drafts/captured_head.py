"""An EAGLE-style head's drafting as one captured step.

A GPU appends what was committed and grows the trees of all answers in one launch, from one upload
of numbers to one read. Row r is slot r, of the target's cache and of the head's. Every row grows
the largest tree that is captured; what its method's tree does not have is padding. Rows without an
answer write behind all answers, where trees are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deft_policies.decoding.captured import NARROW, Layout, bucket
from deft_policies.decoding.drafts.growth import (
    Grown,
    Level,
    Limits,
    beam_tree,
    drawing_at,
    pack_grown,
    read_packed,
    template_tree,
)
from deft_policies.decoding.plan import MOST_BRANCHES, MOST_LEVELS, TreeShape
from deft_policies.model.draft_heads import EagleHead, HeadPasses
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.llama import take_rows
from deft_policies.model.sizes import LlamaSizes, TokenRange
from deft_policies.model.staging import to_device

if TYPE_CHECKING:
    from deft_policies.decoding.sequence import Sequence
    from deft_policies.decoding.target import Target
    from deft_policies.decoding.tree import Branches

MOST_OPEN = MOST_LEVELS * MOST_BRANCHES  # nodes that get children in any tree
LARGEST = TreeShape()  # whose steps are captured; smaller ones are padded
_DRAWN = LARGEST.as_template()  # a chain
_PENDING = NARROW  # committed pairs that a step appends at most
_OF_ROW = 2 * _PENDING + 10  # numbers of a row
# An estimate of what captured steps take: kernels of one, and bytes of each.
_NODES_OF_STEP, _BYTES_OF_NODE = 300, 10_000


@dataclass(frozen=True)
class Way:
    """How drafts are chosen: answers that have it in common are drafted for together."""

    whole_vocabulary: bool  # rather than action tokens
    is_drawn: bool  # by their odds


_LIKELIEST, _OF_ALL, _BY_ODDS = Way(False, False), Way(True, False), Way(False, True)


@dataclass(frozen=True)
class HeadRow:
    """What one answer brings to a step."""

    sequence: Sequence
    start: int  # position of the first pair that was committed
    nodes: list[int]  # of the last pass, whose hidden states those pairs have
    seen: int  # the last committed position that the last pair and the tree see
    position: int  # the rotary position of the tree's first level
    depth: int  # levels that are of use


def way_of(sequence: Sequence) -> Way | None:
    """How drafts of an answer are chosen; None where such trees are not captured."""
    method, shape = sequence.method, sequence.shape.cut(sequence.draft_depth)
    way = Way(method.whole_vocabulary, method.draws)
    is_small = (
        shape.levels <= LARGEST.levels
        and shape.top_k <= LARGEST.top_k
        and shape.num_guesses <= LARGEST.num_guesses
    )
    is_known = way in (_LIKELIEST, _OF_ALL, _BY_ODDS)
    return way if is_known and is_small and not shape.paths else None


def steps_of(batches: Items[int]) -> list[tuple[int, Way]]:
    """Rows and ways of all steps that are captured. Few draw, so they share the largest."""
    usual = [(rows, way) for rows in batches for way in (_LIKELIEST, _OF_ALL)]
    return [*usual, *((rows, _BY_ODDS) for rows in dict.fromkeys((batches[0], 1)))]


def bytes_of(layout: Layout, sizes: LlamaSizes, itemsize: int) -> dict[str, int]:
    """Bytes that are allocated for a head besides its weights, by purpose.

    `sizes` are the target's: a layer of the head is one of its own.
    """
    token = 2 * sizes.num_kv_heads * sizes.head_dim * itemsize
    cached = layout.num_slots * (layout.longest + MOST_OPEN) * token
    inputs = 2 * layout.reserve.lengths[-1] + layout.num_slots * bucket(layout.widest)
    odds = layout.num_slots * _DRAWN.num_guesses * sizes.vocabulary * 4
    num_graphs = len(steps_of(layout.reserve.batches)) + 1  # and that of prompts
    return {
        "draft head": cached + inputs * sizes.width * itemsize + odds,
        "its graphs": num_graphs * _NODES_OF_STEP * _BYTES_OF_NODE,
    }


class CapturedHead:
    """Drafts for any answers over one cache."""

    def __init__(
        self, head: EagleHead, target: Target, cache: KVCache, layout: Layout, sees_tree: bool
    ) -> None:
        """Set everything aside. Where a node sees its tree, it sees itself and its ancestors."""
        self._target, self._cache, self._layout = target, cache, layout
        self._sees_tree = sees_tree
        self._room = layout.longest  # positions of committed pairs; those of trees lie behind
        cache.fix(layout.num_slots, self._room + MOST_OPEN, self)
        self._passes = HeadPasses(head, cache, target.decoder.kernels)
        weight, longest = head.fc.weight, layout.reserve.lengths[-1]
        num_slots, num_kept = layout.num_slots, LARGEST.num_guesses
        device, width = weight.device, head.width
        with torch.inference_mode(False):
            # Hidden states of the last pass of each slot, and of one prompt with its embeddings.
            self._nodes = weight.new_zeros(num_slots, bucket(layout.widest), width)
            self._hidden, self._embeds = (weight.new_zeros(longest, width) for _ in range(2))
            self._numbers = torch.zeros(num_slots * _OF_ROW, dtype=torch.int64, device=device)
            shape = num_slots, 4, num_kept
            self._grown = torch.zeros(shape, dtype=torch.float64, device=device)
            shape = num_slots, _DRAWN.num_guesses, target.num_tokens
            self._odds = torch.zeros(shape, dtype=torch.float32, device=device)

    def capture(self) -> None:
        """Capture every step, none of which anybody waits for."""
        self._read_prompt(0, 1)
        for num_rows, way in steps_of(self._layout.reserve.batches):
            self._upload(self._padding() * num_rows)
            self._run(num_rows, way)

    def read_prompt(self, slot: int, embeds: Tensor, hidden: Tensor) -> None:
        """Append the pairs of a prompt, [position, width] each."""
        num_pairs = len(embeds)
        self._embeds[:num_pairs].copy_(embeds)
        self._hidden[:num_pairs].copy_(hidden)
        self._read_prompt(slot, num_pairs)

    def _read_prompt(self, slot: int, num_pairs: int) -> None:
        self._upload([slot, num_pairs])
        self._target.runner.run((self, "prompt"), self._prompt, ())

    def _prompt(self) -> tuple[()]:
        slot, num_pairs = self._numbers[0], self._numbers[1]
        positions = torch.arange(len(self._embeds), device=slot.device)
        is_padding = (positions >= num_pairs)[:, None]  # of another prompt
        embeds, hidden = (
            states.masked_fill(is_padding, 0.0) for states in (self._embeds, self._hidden)
        )
        self._passes.read(embeds, hidden, slot)
        return ()

    def keep(self, slot: int, hidden: Tensor) -> None:
        """Keep what the target computed of the nodes [node, width] of an answer's pass."""
        self._nodes[slot, : len(hidden)].copy_(hidden)

    def kept(self, slot: int, nodes: Items[int]) -> Tensor:
        """Hidden states of some nodes of the last pass, in memory of their own."""
        index = to_device([*nodes], self._nodes.device, torch.int64)
        return self._nodes[slot].index_select(0, index)

    def takes(self, nodes: Items[int]) -> bool:
        """Whether a step appends so many pairs."""
        return len(nodes) <= _PENDING

    def grow(self, rows: Items[HeadRow], way: Way) -> list[Branches]:
        """Append what was committed and grow the trees of answers that are drafted for one way.

        The odds of drawn drafts are overwritten by the next step.
        """
        by_slot = {row.sequence.slot: row for row in rows}
        batches = [
            num_rows for num_rows, known in steps_of(self._layout.reserve.batches) if known == way
        ]
        num_rows = bucket(1 + max(by_slot), sorted(batches))
        numbers: list[int] = []
        for slot in range(num_rows):
            numbers += self._encode(by_slot[slot]) if slot in by_slot else self._padding()
        self._upload(numbers)
        self._run(num_rows, way)
        num_kept = (_DRAWN if way.is_drawn else LARGEST).num_guesses
        grown = read_packed(
            self._grown[:num_rows, :, :num_kept], self._odds if way.is_drawn else None
        )
        return [grown[row.sequence.slot] for row in rows]

    def _encode(self, row: HeadRow) -> list[int]:
        sequence, num = row.sequence, len(row.nodes)
        shape, missing = sequence.shape, [0] * (_PENDING - num)
        temperature = struct.unpack("<q", struct.pack("<d", sequence.method.temperature or 1.0))
        return [
            *sequence.tokens[len(sequence.tokens) - num :],
            *missing,
            *row.nodes,
            *missing,
            row.start,
            num,
            row.seen,
            row.position,
            min(row.depth, shape.levels),
            shape.top_k,
            shape.num_guesses,
            sequence.noise_key,
            sequence.count,
            *temperature,
        ]

    def _padding(self) -> list[int]:
        """The numbers of a row without an answer: one pair behind all answers."""
        one = struct.unpack("<q", struct.pack("<d", 1.0))
        return [0] * 2 * _PENDING + [self._room, 1, 0, 0, 1, 1, 1, 0, 0, *one]

    def _upload(self, numbers: list[int]) -> None:
        self._numbers[: len(numbers)].copy_(
            to_device(numbers, self._numbers.device, torch.int64), non_blocking=True
        )

    def _run(self, num_rows: int, way: Way) -> None:
        self._target.runner.run((self, num_rows, way), lambda: self._grow(num_rows, way), ())

    def _grow(self, num_rows: int, way: Way) -> tuple[()]:
        numbers = self._numbers[: num_rows * _OF_ROW].view(num_rows, _OF_ROW)
        tokens, nodes, others = torch.split(numbers, [_PENDING, _PENDING, 10], dim=1)
        start, num_pairs, seen, position, deepest, top_k, num_guesses = others[:, :7].unbind(1)
        positions = torch.arange(self._room, device=numbers.device)
        committed = (positions <= seen[:, None])[:, None]  # [row, 1, position]
        out = self._append(tokens, nodes, start, num_pairs, committed)
        extend = self._extending(out, position, committed, way)
        log_probs, first = self._log_probs(out, way), self._drafted(way).first
        if way.is_drawn:
            keys, counts = others[:, 7], others[:, 8]
            temperatures = others[:, 9].contiguous().view(torch.float64).float()
            num_tokens = self._target.num_tokens
            draw = drawing_at(temperatures[:, None, None], keys, counts, first, num_tokens)
            grown = template_tree(_DRAWN, log_probs, extend, deepest, first, draw)
        else:
            limits = Limits(top_k, num_guesses)
            grown = beam_tree(LARGEST, log_probs, extend, deepest, first, limits)
        self._write(num_rows, grown)
        return ()

    def _append(
        self, tokens: Tensor, nodes: Tensor, start: Tensor, num_pairs: Tensor, committed: Tensor
    ) -> Tensor:
        """Take in committed pairs; the head's output at each row's last, [row, width]."""
        hidden = take_rows(self._nodes[: len(nodes)], nodes)
        positions = start[:, None] + torch.arange(_PENDING, device=start.device)
        seen = committed[:, None].expand(-1, -1, _PENDING, -1)
        attention = self._passes.attention(hidden, positions, positions, seen)
        last = attention.of_rows_out(num_pairs[:, None] - 1)
        embeds = self._target.embed(tokens)
        return self._passes.run(embeds.flatten(0, 1), hidden.flatten(0, 1), last)

    def _extending(
        self, out: Tensor, position: Tensor, committed: Tensor, way: Way
    ) -> Callable[[Level], Tensor]:
        """What gives the log-probabilities of children, level by level."""
        hidden = out[:, None]  # of the nodes that were open last, [row, node, width]
        num_rows = len(out)

        def extend(level: Level) -> Tensor:
            nonlocal hidden
            above, width = take_rows(hidden, level.above), level.tokens.shape[1]
            ancestors = level.ancestors if self._sees_tree else torch.zeros_like(level.ancestors)
            seen = torch.cat((committed.expand(-1, width, -1), ancestors), dim=2)[:, None]
            steps = torch.arange(width, device=out.device).expand(num_rows, -1)
            cache_positions = steps + (seen.shape[3] - width)
            positions = (position + level.depth - 1)[:, None].expand(-1, width)
            attention = self._passes.attention(above, positions, cache_positions, seen)
            embeds = self._target.embed(level.tokens).flatten(0, 1)
            found = self._passes.run(embeds, above.flatten(0, 1), attention)
            hidden = found.view(num_rows, width, -1)
            return self._log_probs(hidden, way)

        return extend

    def _drafted(self, way: Way) -> TokenRange:
        all_tokens = TokenRange(0, self._target.num_tokens - 1)
        return all_tokens if way.whole_vocabulary else self._target.action_tokens

    def _log_probs(self, hidden: Tensor, way: Way) -> Tensor:
        return self._target.logits(hidden, self._drafted(way)).log_softmax(dim=-1)

    def _write(self, num_rows: int, grown: Grown) -> None:
        packed, odds = pack_grown(grown), grown[4]
        self._grown[:num_rows, :, : packed.shape[2]].copy_(packed)
        if odds is not None:
            self._odds[:num_rows].copy_(odds)
