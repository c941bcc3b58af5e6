"""Drafts of a block head: one pass of a small network for all tokens that it drafts."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from deft_policies.decoding import kinds
from deft_policies.decoding.captured import Layout
from deft_policies.decoding.drafts import Chain, Guesses, ModelSource
from deft_policies.decoding.drafts.captured_block import BlockRow, CapturedBlock
from deft_policies.decoding.drafts.growth import drawing, grow, read_grown
from deft_policies.decoding.sequence import Sequence
from deft_policies.decoding.target import Prompt, Target
from deft_policies.decoding.tree import Branches
from deft_policies.model.block_head import BlockHead
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.staging import to_device

# A draft of a chain is verified where the chance that it and all before it are accepted is at least
# so large. Of exact methods alone: a relaxed method's answer depends on what is drafted.
LEAST_CHANCE = 0.2


@dataclass
class _Context:
    """What the head knows of one answer."""

    num_cached: int  # positions whose keys and values are in the head's cache
    states: list[Tensor] = field(default_factory=list)  # of committed positions behind those
    nodes: list[int] = field(default_factory=list)  # the same of the last pass, where captured


class BlockDrafts(ModelSource):
    """A chain, or a tree over the places of one block.

    The head's cache has the target's slots. On a CPU every answer has a pass of its own, so that
    drafts do not depend on neighbours.
    """

    kind = kinds.BLOCK
    reads_prompts = True
    reads_states = True

    def __init__(self, head: BlockHead, target: Target) -> None:
        self.head, self._target = head, target
        self._cache = KVCache(head.sizes.backbone, head.fuse.weight)
        self._captured: CapturedBlock | None = None

    def capture(self, layout: Layout) -> None:
        """Draft in captured steps from now on."""
        if self._captured is None:
            self._captured = CapturedBlock(self.head, self._target, self._cache, layout)
        self._captured.capture()

    def observe_prompt(self, sequence: Sequence, prompt: Prompt, hidden: Tensor) -> None:
        """Take in all positions but the last, which comes with the nodes of the prefill."""
        num = prompt.length - 1
        self._cache.reserve(
            sequence.slot + 1, prompt.length + sequence.limit + 1 + self.head.sizes.places
        )
        sequence.notes[self.kind] = _Context(num)
        if self._captured is not None:
            self._captured.read_prompt(sequence.slot, hidden[:-1])
            return
        self._append(sequence.slot, 0, hidden[:-1])

    def observe(self, sequence: Sequence, hidden: Tensor, logits: Tensor) -> None:
        """Keep the states along the accepted path."""
        assert sequence.last is not None
        context: _Context = sequence.notes[self.kind]
        path = sequence.last.path
        if self._captured is None:
            context.states.append(hidden[to_device(path, hidden.device, torch.int64)])
            return
        if context.nodes:  # of a pass behind which nothing was drafted
            self._take_in(sequence, context, context.nodes)
        self._captured.keep(sequence.slot, hidden)
        context.nodes = path

    def draft_all(self, sequences: Items[Sequence]) -> list[Guesses]:
        """Captured steps for chains and for trees; a pass for each answer where there are none."""
        by_answer: dict[int, Guesses] = {}
        by_way: dict[bool, list[Sequence]] = {}
        for sequence in sequences:
            if self._captured is not None and self._captured.takes(sequence):
                by_way.setdefault(_is_chain(sequence), []).append(sequence)
            else:
                by_answer[id(sequence)] = _cut(sequence, *self._draft(sequence))
        for is_chain, group in by_way.items():
            drafted = self._replay(group, is_chain)
            by_answer |= {
                id(sequence): _cut(sequence, *of)
                for sequence, of in zip(group, drafted, strict=True)
            }
        return [by_answer[id(sequence)] for sequence in sequences]

    def _replay(
        self, sequences: Items[Sequence], is_chain: bool
    ) -> list[tuple[Branches, list[float]]]:
        """Draft in a captured step."""
        captured, rows = self._captured, []
        assert captured is not None
        for sequence in sequences:
            context: _Context = sequence.notes[self.kind]
            if len(context.nodes) > captured.most_pending:
                self._take_in(sequence, context, context.nodes[: -captured.most_pending])
            rows.append(
                BlockRow(sequence, context.num_cached, context.nodes, self._depth_of(sequence))
            )
            context.num_cached += len(context.nodes)
            context.nodes = []
        return captured.grow(rows, is_chain)

    def _take_in(self, sequence: Sequence, context: _Context, nodes: list[int]) -> None:
        """Append some of the last pass's nodes in captured steps, without drafting."""
        assert self._captured is not None
        self._captured.append(sequence, context.num_cached, nodes)
        context.num_cached += len(nodes)
        context.nodes = context.nodes[len(nodes) :]

    def _depth_of(self, sequence: Sequence) -> int:
        """Levels of a tree that are of use, and that a block has."""
        return min(sequence.draft_depth, self.head.sizes.places, sequence.shape.levels)

    def _draft(self, sequence: Sequence) -> tuple[Branches, list[float]]:
        """Draft for one answer; of a chain also how likely each draft is accepted."""
        depth = max(self._depth_of(sequence), 1)
        context: _Context = sequence.notes[self.kind]
        if self._captured is not None:
            self._target.runner.note(("block", sequence.shape, sequence.method.drafting))
            context.states = [self._captured.kept(sequence.slot, context.nodes)]
            context.nodes = []
        states, context.states = torch.cat(context.states), []
        self._append(sequence.slot, context.num_cached, states)
        context.num_cached += len(states)
        device, places = states.device, self.head.sizes.places
        anchor = to_device(sequence.tokens[-1:], device, torch.int64)
        # Tokens that a grammar forces lie between: their states are not known yet.
        position = sequence.num_prompt + len(sequence.tokens) - 1
        positions = position + torch.arange(places, device=device)[None]
        here = slice(sequence.slot, sequence.slot + 1)
        window = self._cache.open_same(here, context.num_cached, places)
        hidden = self.head.run(self._target.embed(anchor), positions, window)
        ahead = self._target.logits(hidden, self.head.sizes.tokens)
        if _is_chain(sequence) and not sequence.method.draws:
            return self._chain(sequence, hidden[0], ahead[0], anchor, depth)
        key = to_device([sequence.noise_key], device, torch.int64)
        count = to_device([sequence.count], device, torch.int64)
        first = self.head.sizes.tokens.first
        draw = drawing(sequence.method, key, count, first, self._target.num_tokens)
        shape = sequence.shape if draw is None else sequence.shape.as_template()
        grown = grow(
            shape.cut(depth),
            self.head.follow(ahead, 0, anchor[:, None])[:, 0],
            lambda level: self.head.follow(ahead, level.depth, level.tokens),
            to_device([depth], device, torch.int64),
            first,
            draw,
        )
        return read_grown(grown, 1)[0], []

    def _chain(
        self, sequence: Sequence, hidden: Tensor, ahead: Tensor, anchor: Tensor, depth: int
    ) -> tuple[Branches, list[float]]:
        """The likeliest token of each place after the one before it, and chances of acceptance.

        A tree of one branch would be the same, with ten times the steps.
        """
        head, previous = self.head, list[Tensor]()
        tokens, scores = [], []
        embeds = head.previous_embeds(anchor)  # [1, rank]
        for place in range(depth):
            previous.append(embeds)
            best = (ahead[place] + head.markov(embeds).float()).log_softmax(dim=-1).max(dim=-1)
            tokens.append(best.indices)
            scores.append(best.values)
            embeds = head.before(best.indices)
        read: list[Tensor] = [torch.cat(tokens), torch.cat(scores)]
        if sequence.method.rule.is_exact:  # other rules verify every draft
            read.append(head.chances(hidden[:depth], torch.cat(previous)).sigmoid())
        # One read of the device for all of them; float64 holds every token id.
        columns, log_probs, *chances = torch.stack([values.double() for values in read]).tolist()
        drafted = [int(column) + head.sizes.tokens.first for column in columns]
        tree = Branches(drafted, list(range(depth)), list(accumulate(log_probs)))
        return tree, chances[0] if chances else []

    def _append(self, slot: int, start: int, states: Tensor) -> None:
        """Take in states [position, width] of committed positions from `start` on."""
        positions = start + torch.arange(len(states), device=states.device)[None]
        window = self._cache.open_same(slice(slot, slot + 1), start, len(states))
        self.head.append(states[None], positions, window)


def _is_chain(sequence: Sequence) -> bool:
    return sequence.shape.top_k == 1 and not sequence.shape.paths


def _cut(sequence: Sequence, tree: Branches, chances: list[float]) -> Guesses:
    """A chain of an exact method as far as it is likely accepted; else all that was drafted."""
    if not chances or not sequence.method.rule.is_exact:
        return tree
    chain: Chain = []
    survival = 1.0
    for token, chance in zip(tree.tokens, chances, strict=False):
        survival *= chance
        if survival < LEAST_CHANCE:
            break
        chain.append(token)
    return [chain] if chain else []
