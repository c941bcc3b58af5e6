"""A block head's drafting as one captured step.

A GPU appends what was committed, runs the block and grows the trees of all answers in one launch,
from one upload of numbers to one read. Row r is slot r, of the target's cache and of the head's.
Rows without an answer write behind all answers.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deft_policies.decoding.captured import NARROW, Layout, bucket
from deft_policies.decoding.drafts.growth import (
    Level,
    Limits,
    beam_tree,
    pack_grown,
    read_packed,
)
from deft_policies.decoding.plan import TreeShape
from deft_policies.model.block_head import BlockHead, BlockPasses, BlockSizes
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.llama import take_rows
from deft_policies.model.staging import to_device

if TYPE_CHECKING:
    from deft_policies.decoding.sequence import Sequence
    from deft_policies.decoding.target import Target
    from deft_policies.decoding.tree import Branches

_PENDING = NARROW  # committed positions that a step appends at most
_OF_ROW = _PENDING + 7  # numbers of a row
# An estimate of what captured steps take: kernels of one, and bytes of each.
_NODES_OF_STEP, _BYTES_OF_NODE = 150, 10_000


@dataclass(frozen=True)
class BlockRow:
    """What one answer brings to a step."""

    sequence: Sequence
    start: int  # position of the first that was committed
    nodes: list[int]  # of the last pass, whose hidden states those positions have
    depth: int  # levels that are of use


def largest(places: int) -> TreeShape:
    """The tree whose steps are captured; smaller ones are padded."""
    return TreeShape(min(places, TreeShape().levels))


def bytes_of(layout: Layout, sizes: BlockSizes, itemsize: int) -> dict[str, int]:
    """Bytes that are allocated for a head besides its weights, by purpose."""
    backbone = sizes.backbone
    position = 2 * backbone.num_layers * backbone.num_kv_heads * backbone.head_dim * itemsize
    cached = layout.num_slots * (layout.longest + max(_PENDING, sizes.places)) * position
    states = (len(sizes.read_layers) + 1) * backbone.width * itemsize
    # Of nodes and prompts in the target's passes, and once more in the head's own memory.
    num_states = layout.num_nodes + 2 * layout.longest + layout.num_slots * bucket(layout.widest)
    num_graphs = 2 * len(layout.reserve.batches) + 1
    return {
        "block head": cached + num_states * states,
        "graphs of the block head": num_graphs * _NODES_OF_STEP * _BYTES_OF_NODE,
    }


class CapturedBlock:
    """Drafts for any answers over one cache."""

    most_pending = _PENDING  # positions that a step appends, at most

    def __init__(self, head: BlockHead, target: Target, cache: KVCache, layout: Layout) -> None:
        """Set everything aside."""
        self._head, self._target, self._layout = head, target, layout
        self._places, self._room = head.sizes.places, layout.longest
        self._largest, self._chain = largest(self._places), TreeShape.chain(self._places)
        cache.fix(layout.num_slots, self._room + max(_PENDING, self._places), self)
        self._passes = BlockPasses(head, cache, target.decoder.kernels)
        weight, longest = head.fuse.weight, layout.reserve.lengths[-1]
        num_slots = layout.num_slots
        num_kept = max(self._largest.num_guesses, self._places)
        device, width = weight.device, weight.shape[1]
        with torch.inference_mode(False):
            # States of the last pass of each slot, and of one prompt.
            self._nodes = weight.new_zeros(num_slots, bucket(layout.widest), width)
            self._prompt = weight.new_zeros(longest, width)
            self._numbers = torch.zeros(num_slots * _OF_ROW, dtype=torch.int64, device=device)
            shape = num_slots, 5, num_kept
            self._grown = torch.zeros(shape, dtype=torch.float64, device=device)

    def capture(self) -> None:
        """Capture every step, none of which anybody waits for."""
        self._read_prompt(0, 1)
        for num_rows in self._layout.reserve.batches:
            for is_chain in (True, False):
                self._upload(self._padding() * num_rows)
                self._run(num_rows, is_chain)

    def read_prompt(self, slot: int, states: Tensor) -> None:
        """Append the positions of a prompt, states [position, width]."""
        self._prompt[: len(states)].copy_(states)
        self._read_prompt(slot, len(states))

    def _read_prompt(self, slot: int, num_positions: int) -> None:
        self._upload([slot, num_positions])
        self._target.runner.run((self, "prompt"), self._append_prompt, ())

    def _append_prompt(self) -> tuple[()]:
        slot, num_positions = self._numbers[:1], self._numbers[1]
        positions = torch.arange(len(self._prompt), device=slot.device)
        is_padding = (positions >= num_positions)[:, None]  # of another prompt
        self._passes.append(self._prompt.masked_fill(is_padding, 0.0)[None], slot, positions[None])
        return ()

    def keep(self, slot: int, states: Tensor) -> None:
        """Keep what the target computed of the nodes [node, width] of an answer's pass."""
        self._nodes[slot, : len(states)].copy_(states)

    def kept(self, slot: int, nodes: Items[int]) -> Tensor:
        """States of some nodes of the last pass, in memory of their own."""
        index = to_device([*nodes], self._nodes.device, torch.int64)
        return self._nodes[slot].index_select(0, index)

    def takes(self, sequence: Sequence) -> bool:
        """Whether drafts of an answer are captured: small trees, of likeliest tokens."""
        shape, most = sequence.shape, self._largest
        is_chain = shape.top_k == 1
        is_small = shape.top_k <= most.top_k and shape.num_guesses <= most.num_guesses
        return (is_chain or is_small) and not shape.paths and not sequence.method.draws

    def append(self, sequence: Sequence, start: int, nodes: list[int]) -> None:
        """Take in committed positions behind which nothing is drafted."""
        for first in range(0, len(nodes), _PENDING):
            part = nodes[first : first + _PENDING]
            self._step([BlockRow(sequence, start + first, part, 1)], is_chain=True)

    def grow(self, rows: Items[BlockRow], is_chain: bool) -> list[tuple[Branches, list[float]]]:
        """Append what was committed and draft; of chains also how likely each draft is accepted."""
        num_rows = self._step(rows, is_chain)
        num_kept = self._places if is_chain else self._largest.num_guesses
        read = self._grown[:num_rows, :, :num_kept].cpu()
        grown, chances = read_packed(read[:, :4], None), read[:, 4].tolist()
        slots = [row.sequence.slot for row in rows]
        return [(grown[slot], chances[slot] if is_chain else []) for slot in slots]

    def _step(self, rows: Items[BlockRow], is_chain: bool) -> int:
        by_slot = {row.sequence.slot: row for row in rows}
        num_rows = bucket(1 + max(by_slot), sorted(self._layout.reserve.batches))
        numbers: list[int] = []
        for slot in range(num_rows):
            numbers += self._encode(by_slot[slot]) if slot in by_slot else self._padding()
        self._upload(numbers)
        self._run(num_rows, is_chain)
        return num_rows

    def _encode(self, row: BlockRow) -> list[int]:
        sequence, num = row.sequence, len(row.nodes)
        return [
            *row.nodes,
            *[0] * (_PENDING - num),
            sequence.tokens[-1],
            row.start,
            num,
            sequence.num_prompt + len(sequence.tokens) - 1,
            row.depth,
            sequence.shape.top_k,
            sequence.shape.num_guesses,
        ]

    def _padding(self) -> list[int]:
        """The numbers of a row without an answer: it writes behind all answers."""
        return [*[0] * _PENDING, 0, self._room, 0, 0, 1, 1, 1]

    def _upload(self, numbers: list[int]) -> None:
        self._numbers[: len(numbers)].copy_(
            to_device(numbers, self._numbers.device, torch.int64), non_blocking=True
        )

    def _run(self, num_rows: int, is_chain: bool) -> None:
        key = (self, num_rows, is_chain)
        self._target.runner.run(key, lambda: self._grow(num_rows, is_chain), ())

    def _grow(self, num_rows: int, is_chain: bool) -> tuple[()]:
        numbers = self._numbers[: num_rows * _OF_ROW].view(num_rows, _OF_ROW)
        nodes, others = numbers[:, :_PENDING], numbers[:, _PENDING:]
        anchors, start, num, position, deepest, top_k, num_guesses = others.unbind(1)
        slots = torch.arange(num_rows, device=numbers.device)
        steps = torch.arange(_PENDING, device=numbers.device)
        states = take_rows(self._nodes[:num_rows], nodes)
        # What is behind the last one is written over by the block.
        self._passes.append(states, slots, start[:, None] + steps)
        positions = position[:, None] + torch.arange(self._places, device=numbers.device)
        hidden = self._passes.run(self._target.embed(anchors), positions, start + num)
        head, tokens = self._head, self._head.sizes.tokens
        ahead = self._target.logits(hidden, tokens)
        first = head.follow(ahead, 0, anchors[:, None])[:, 0]

        def extend(level: Level) -> Tensor:
            return head.follow(ahead, level.depth, level.tokens)

        if is_chain:
            grown = beam_tree(self._chain, first, extend, deepest, tokens.first)
        else:
            limits = Limits(top_k, num_guesses)
            grown = beam_tree(self._largest, first, extend, deepest, tokens.first, limits)
        packed = pack_grown(grown)
        self._grown[:num_rows, :4, : packed.shape[2]].copy_(packed)
        if is_chain:
            before = torch.cat((anchors[:, None], grown[0][:, :-1]), dim=1)
            chances = head.chances(hidden, head.previous_embeds(before)).sigmoid()
            self._grown[:num_rows, 4, : self._places].copy_(chances)
        return ()
