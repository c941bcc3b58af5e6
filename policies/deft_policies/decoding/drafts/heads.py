"""Heads that draft from the target's hidden states.

EAGLE-2 (Li et al. 2024) is a small decoder layer; Medusa (Cai et al. 2024) is a head for each
position ahead.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deft_policies.decoding import kinds
from deft_policies.decoding.captured import Layout
from deft_policies.decoding.drafts import Guesses, ModelSource
from deft_policies.decoding.drafts.captured_head import (
    MOST_OPEN,
    CapturedHead,
    HeadRow,
    Way,
    way_of,
)
from deft_policies.decoding.drafts.growth import Level, drawing, grow, read_grown
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import KeyMask, RopeOffset, TreeShape
from deft_policies.decoding.sequence import Sequence
from deft_policies.decoding.target import Prompt, Target
from deft_policies.model.draft_heads import EagleHead, MedusaHeads
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.llama import take_rows
from deft_policies.model.sizes import TokenRange
from deft_policies.model.staging import to_device


@dataclass
class _Pairs:
    """What the head knows of one answer."""

    num_prompt: int  # positions of the prompt
    num_cached: int  # pairs whose keys and values are in the head's cache
    hidden: list[Tensor]  # of the target, one for each token behind those pairs: [step, width]
    nodes: list[int] = field(default_factory=list)  # the same behind those, where it is captured
    has_grown: bool = False  # whether it has drafted for this answer before


class EagleDrafts(ModelSource):
    """A tree from an EAGLE-style head, which keeps the keys of committed positions.

    Position t pairs the hidden state of the t-th token with the embedding of the one after it. The
    head's cache has the target's slots; nodes of the tree in flight lie behind the committed
    positions, at positions that are the same in every slot.
    """

    kind = kinds.HEAD
    reads_prompts = True

    def __init__(
        self,
        head: EagleHead,
        target: Target,
        rope_offset: RopeOffset = RopeOffset.CORRECT,
        key_mask: KeyMask = KeyMask.CAUSAL,
    ) -> None:
        self.head = head
        self._target = target
        self._rope_offset, self._key_mask = rope_offset, key_mask
        self._cache = KVCache(head.sizes, head.fc.weight)
        self._captured: CapturedHead | None = None

    def capture(self, layout: Layout) -> None:
        """Draft in captured steps from now on."""
        if self._captured is None:
            sees_tree = self._key_mask is KeyMask.CAUSAL
            self._captured = CapturedHead(self.head, self._target, self._cache, layout, sees_tree)
        self._captured.capture()

    @property
    def _room(self) -> int:
        """Positions for committed tokens; those of a tree lie behind."""
        return self._cache.num_positions - MOST_OPEN

    def observe_prompt(self, sequence: Sequence, prompt: Prompt, hidden: Tensor) -> None:
        """Take in the pairs of all positions but the last."""
        num_pairs = prompt.length - 1
        reach = prompt.length + sequence.limit + 1 + MOST_OPEN
        self._cache.reserve(sequence.slot + 1, reach)
        num_patches = prompt.patches.stop - (prompt.patches.start or 0)
        pairs = _Pairs(prompt.length, num_pairs, [])
        sequence.notes[self.kind] = pairs, num_patches
        if self._captured is not None:
            self._captured.read_prompt(sequence.slot, prompt.embeds[1:], hidden[:-1])
            return
        embeds, before = prompt.embeds[None, 1:], hidden[None, :-1]
        positions = torch.arange(num_pairs, device=embeds.device)[None]
        here = slice(sequence.slot, sequence.slot + 1)
        window = self._cache.open_same(here, 0, num_pairs)
        self.head.read(embeds, before, self.head.attend(before, positions, window=window))

    def observe(self, sequence: Sequence, hidden: Tensor, logits: Tensor) -> None:
        """Keep the hidden states along the accepted path."""
        assert sequence.last is not None
        pairs, _ = sequence.notes[self.kind]
        path = sequence.last.path
        if self._captured is None:
            pairs.hidden.append(hidden[to_device(path, hidden.device, torch.int64)])
            return
        if pairs.nodes:  # of a pass behind which nothing was drafted
            pairs.hidden.append(self._captured.kept(sequence.slot, pairs.nodes))
        self._captured.keep(sequence.slot, hidden)
        pairs.nodes = path

    def draft_all(self, sequences: Items[Sequence]) -> list[Guesses]:
        """Draft behind the roots; together where trees and methods agree.

        What is captured is drafted for at once, whatever the trees.
        """
        alike: dict[object, list[Sequence]] = {}
        for sequence in sequences:
            way = self._way_of(sequence)
            alike.setdefault(way or (sequence.shape, sequence.method.drafting), []).append(sequence)
        by_answer: dict[int, Guesses] = {}
        for key, group in alike.items():
            drafted = self._replay(group, key) if isinstance(key, Way) else self._draft(group)
            by_answer |= zip(map(id, group), drafted, strict=True)
        return [by_answer[id(sequence)] for sequence in sequences]

    def _way_of(self, sequence: Sequence) -> Way | None:
        """How a captured step drafts for an answer; None where none can."""
        if self._captured is None:
            return None
        pairs, _ = sequence.notes[self.kind]
        way = way_of(sequence)
        if way is None or pairs.hidden or not self._captured.takes(pairs.nodes):
            self._target.runner.note(("head", sequence.shape, sequence.method.drafting))
            return None
        return way

    def _replay(self, sequences: Items[Sequence], way: Way) -> list[Guesses]:
        """Draft in a captured step."""
        assert self._captured is not None
        if max(sequence.draft_depth for sequence in sequences) <= 0:
            return [[] for _ in sequences]
        rows = []
        for sequence in sequences:
            pairs, num_patches = sequence.notes[self.kind]
            start, nodes, pairs.nodes = pairs.num_cached, pairs.nodes, []
            pairs.num_cached += len(nodes)
            seen = self._last_seen(pairs, pairs.num_cached - 1)
            position = self._position(pairs, num_patches)
            rows.append(HeadRow(sequence, start, nodes, seen, position, sequence.draft_depth))
            pairs.has_grown = True
        return list(self._captured.grow(rows, way))

    def drafted(self, method: Method) -> TokenRange:
        """The tokens that a method has drafted."""
        all_tokens = TokenRange(0, self._target.num_tokens - 1)
        return all_tokens if method.whole_vocabulary else self._target.action_tokens

    def _draft(self, sequences: Items[Sequence]) -> list[Guesses]:
        device, shape, method = self._target.device, sequences[0].shape, sequences[0].method
        depths = [sequence.draft_depth for sequence in sequences]
        if max(depths) <= 0:
            return [[] for _ in sequences]
        slots = to_device([sequence.slot for sequence in sequences], device, torch.int64)
        out = self._append(sequences, slots)
        notes = [sequence.notes[self.kind] for sequence in sequences]
        numbers = to_device(
            [
                [
                    pairs.num_cached,
                    self._last_seen(pairs, pairs.num_cached - 1),
                    self._position(pairs, num_patches),
                    depth,
                    one.noise_key,
                    one.count,
                    one.tokens[-1],
                ]
                for one, depth, (pairs, num_patches) in zip(sequences, depths, notes, strict=True)
            ],
            device,
            torch.int64,
        )
        _, seen, position, deepest, keys, counts, _ = numbers.unbind(1)
        drafted = self.drafted(method)
        first = drafted.first
        draw = drawing(method, keys, counts, first, self._target.num_tokens)
        shape = (shape if draw is None else shape.as_template()).cut(max(depths))
        hidden = out[:, None]  # of the nodes that were open last

        def extend(level: Level) -> Tensor:
            nonlocal hidden
            hidden = self._read(level, take_rows(hidden, level.above), position, seen, slots)
            return self._log_probs(hidden, drafted)

        grown = grow(shape, self._log_probs(out, drafted), extend, deepest, first, draw)
        for pairs, _ in notes:
            pairs.has_grown = True
        return list(read_grown(grown, len(sequences)))

    def _append(self, sequences: Items[Sequence], slots: Tensor) -> Tensor:
        """Take in the pairs that were committed; the head's output at the last, [row, width].

        A pass adds a pair for every node of its path, the bonus being the last "token after".
        """
        notes: list[_Pairs] = [sequence.notes[self.kind][0] for sequence in sequences]
        for pairs, one in zip(notes, sequences, strict=True):
            if self._captured is not None and pairs.nodes:
                pairs.hidden.append(self._captured.kept(one.slot, pairs.nodes))
                pairs.nodes = []
        new_states = [torch.cat(pairs.hidden) for pairs in notes]
        hidden = pad_sequence(new_states, batch_first=True)
        sizes, num_steps = [len(states) for states in new_states], hidden.shape[1]
        device = hidden.device
        starts = [pairs.num_cached for pairs in notes]
        last = [self._last_seen(p, p.num_cached + n - 1) for p, n in zip(notes, sizes, strict=True)]
        tokens = [
            [*one.tokens[len(one.tokens) - size :], *[0] * (num_steps - size)]
            for one, size in zip(sequences, sizes, strict=True)
        ]
        numbers = to_device([starts, last, sizes], device, torch.int64)
        positions = numbers[0][:, None] + torch.arange(num_steps, device=device)
        mask = self._visible(numbers[1][:, None])[:, None]
        window = self._cache.open_at(slots, positions, self._room)
        kept = numbers[2][:, None] - 1
        attention = self.head.attend(hidden, positions, mask, window).of_rows_out(kept)
        embeds = self._target.embed(to_device(tokens, device, torch.int64))
        out = self.head.run(embeds, hidden, attention)
        for pairs, size in zip(notes, sizes, strict=True):
            pairs.num_cached += size
            pairs.hidden = []
        return out[:, 0]

    def _last_seen(self, pairs: _Pairs, position: int) -> int:
        """The last committed pair that a query at a position sees."""
        return position if self._key_mask is KeyMask.CAUSAL else pairs.num_prompt - 2

    def _position(self, pairs: _Pairs, num_patches: int) -> int:
        """The rotary position of the tree's first level."""
        if self._rope_offset is RopeOffset.PUBLISHED:
            return (pairs.num_cached - num_patches) * pairs.has_grown
        return pairs.num_cached

    def _visible(self, last: Tensor) -> Tensor:
        """Positions up to the `last` [row, query] of every query, [row, query, position]."""
        return torch.arange(self._room, device=last.device) <= last[:, :, None]

    def _read(
        self, level: Level, hidden: Tensor, position: Tensor, seen: Tensor, slots: Tensor
    ) -> Tensor:
        """The head's output at open nodes, [row, node, width], from `hidden` at their parents."""
        ancestors = level.ancestors
        num_rows, width = level.tokens.shape
        first = self._room + ancestors.shape[2] - width
        committed = self._visible(seen[:, None]).expand(-1, width, -1)
        if self._key_mask is KeyMask.PREFIX_ONLY:
            ancestors = torch.zeros_like(ancestors)
        positions = (position + level.depth - 1)[:, None].expand(-1, width)
        mask = torch.cat((committed, ancestors), dim=2)[:, None]
        cache_positions = first + torch.arange(width, device=slots.device).expand(num_rows, -1)
        window = self._cache.open_at(slots, cache_positions, first + width)
        attention = self.head.attend(hidden, positions, mask, window)
        return self.head.run(self._target.embed(level.tokens), hidden, attention)

    def _log_probs(self, hidden: Tensor, drafted: TokenRange) -> Tensor:
        return self._target.logits(hidden, drafted).log_softmax(dim=-1)


class MedusaDrafts(ModelSource):
    """A tree from parallel heads, whose scores depend on the depth alone."""

    kind = kinds.MEDUSA

    def __init__(self, heads: MedusaHeads, target: Target) -> None:
        self._heads, self._target = heads, target

    def observe(self, sequence: Sequence, hidden: Tensor, logits: Tensor) -> None:
        """Keep the hidden state that has predicted the root."""
        assert sequence.last is not None
        sequence.notes[self.kind] = hidden[sequence.last.path[-1]].clone()

    def draft_all(self, sequences: Items[Sequence]) -> list[Guesses]:
        """Branch as EAGLE-2 does; a tree of one shape at a time."""
        by_answer: dict[int, Guesses] = {}
        for shape in dict.fromkeys(sequence.shape for sequence in sequences):
            group = [sequence for sequence in sequences if sequence.shape == shape]
            by_answer |= zip(map(id, group), self._draft(group, shape), strict=True)
        return [by_answer[id(sequence)] for sequence in sequences]

    def _draft(self, sequences: Items[Sequence], shape: TreeShape) -> list[Guesses]:
        num_heads = self._heads.num_heads
        depths = [min(num_heads, sequence.draft_depth) for sequence in sequences]
        if max(depths) <= 0:
            return [[] for _ in sequences]
        shape = shape.cut(max(depths))
        drafted = self._target.action_tokens
        seen = torch.stack([sequence.notes[self.kind] for sequence in sequences])
        ahead = self._target.logits(self._heads(seen)[:, : shape.levels], drafted)
        ahead = ahead.log_softmax(dim=-1)

        def extend(level: Level) -> Tensor:
            return ahead[:, level.depth, None].expand(-1, level.tokens.shape[1], -1)

        deepest = to_device(depths, seen.device, torch.int64)
        grown = grow(shape, ahead[:, 0], extend, deepest, drafted.first)
        return list(read_grown(grown, len(sequences)))
