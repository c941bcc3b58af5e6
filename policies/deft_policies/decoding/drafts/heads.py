"""Heads that draft from the target's hidden states.

EAGLE-2 (Li et al. 2024) is a small decoder layer; Medusa (Cai et al. 2024) is a head for each
position ahead.
"""

from dataclasses import replace

import torch
from torch import Tensor

from deft_policies.decoding import kinds
from deft_policies.decoding.batch import Batch, Pass
from deft_policies.decoding.drafts import HIDDEN, DraftSource, drawing
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import MOST_BRANCHES, MOST_LEVELS, KeyMask, RopeOffset
from deft_policies.decoding.target import Prompts, Target
from deft_policies.decoding.tree import DraftLimits, DraftTree, Level
from deft_policies.model.draft_heads import EagleHead, MedusaHeads
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.llama import take_rows
from deft_policies.model.sizes import TokenRange

_MOST_OPEN = MOST_LEVELS * MOST_BRANCHES  # nodes that get children in any tree


class EagleDrafts(DraftSource):
    """A tree from an EAGLE-style head, which keeps the keys of committed positions.

    Its cache holds committed positions first and the nodes of the tree in flight behind them, at
    slots that are the same in every row.
    """

    kind = kinds.HEAD
    needs = frozenset({HIDDEN})
    capturable = True

    def __init__(
        self,
        head: EagleHead,
        target: Target,
        method: Method,
        rope_offset: RopeOffset = RopeOffset.CORRECT,
        key_mask: KeyMask = KeyMask.CAUSAL,
    ) -> None:
        self.head = head
        self._target, self._method = target, method
        self._rope_offset, self._key_mask = rope_offset, key_mask
        whole = method.whole_vocabulary
        self._drafted: TokenRange = target.vocabulary if whole else target.action_tokens
        self._cache = KVCache(head.sizes, head.fc.weight)
        # [row] each: positions of the prompt, and 0 in the first round and 1 later.
        self._prompt = self._has_grown = torch.zeros(0, dtype=torch.int64)
        self._num_patches = 0
        self._room = 0  # slots of committed positions; those of a tree lie behind

    def allocate(self, batch: Batch) -> None:
        """Two counters for every row; keys have their room when rows begin."""
        with torch.inference_mode(False):
            blank = torch.zeros(2, batch.capacity, dtype=torch.int64, device=batch.device)
        self._prompt, self._has_grown = blank
        if batch.longest > 0:
            self._room = batch.longest + batch.positions
            self._cache.fix(batch.capacity, self._room + _MOST_OPEN)

    def begin(self, batch: Batch, prompts: Prompts, hidden: Tensor | None) -> None:
        """Take in the prompts: the pairs of all their positions but the last."""
        assert hidden is not None
        num_rows, num_positions = prompts.embeds.shape[:2]
        reach = num_positions + max(row.limit for row in batch.rows if row is not None)
        alone = len(batch.running) == num_rows
        if not self._cache.is_fixed:
            self._room = max(reach, 0 if alone else self._room)
            self._cache.reserve(batch.capacity, self._room + _MOST_OPEN)
        self._cache.clear(batch.slots)  # the answer before may have left NaN there
        self._num_patches = prompts.patches.stop - prompts.patches.start
        torch.sub(prompts.lengths, 1, out=self._cache.length[batch.slots])
        self._prompt[batch.slots] = prompts.lengths
        self._has_grown[batch.slots] = 0
        embeds, hidden = prompts.embeds[:, 1:], hidden[:, :-1]
        positions = torch.arange(num_positions - 1, device=embeds.device).expand(num_rows, -1)
        window = self._cache.open(
            num_rows, num_positions - 1, read=num_positions, first_row=batch.first
        )
        self.head.read(embeds, hidden, self.head.attend(hidden, positions, window=window))

    def draft(self, batch: Batch, limits: DraftLimits) -> DraftTree:
        """Draft behind the roots."""
        assert batch.last is not None
        n, shape = batch.num_rows, limits.shape
        out = self._append(batch.last, batch.is_open)
        length = self._cache.length[:n]
        seen = self._last_seen(n, length - 1)
        position = length
        if self._rope_offset is RopeOffset.PUBLISHED:
            position = (length - self._num_patches) * self._has_grown[:n]
        drafted = self._drafted.within(self._target.vocabulary)
        draw = drawing(self._method, batch, drafted, len(self._target.vocabulary))
        shape = (shape if draw is None else shape.as_template()).cut(limits.depth)
        hidden = out[:, None]  # of the nodes that were open last

        def extend(level: Level) -> Tensor:
            nonlocal hidden
            hidden = self._read(level, take_rows(hidden, level.above), position, seen)
            return self._log_probs(hidden)

        first, token = self._log_probs(out), self._drafted.first
        tree = self.grow(batch, limits.roots, shape, first, extend, token, draw)
        self._has_grown[:n] = 1
        return tree

    def _append(self, last: Pass, is_open: Tensor) -> Tensor:
        """The head's output at the last of the pass's pairs, [row, width].

        Position t pairs the hidden state of the t-th token with the embedding of the one after it,
        so a pass adds a pair for every node of its path, the bonus being the last "one after".
        """
        hidden, kept = last.hidden, last.num
        assert hidden is not None
        num_rows, num_steps, _ = hidden.shape
        start = self._cache.length[:num_rows]
        positions = start[:, None] + torch.arange(num_steps, device=hidden.device)
        mask = self._visible(self._last_seen(num_rows, start + kept)[:, None])[:, None]
        window = self._cache.open(num_rows, num_steps, read=self._room, slots=positions)
        attention = self.head.attend(hidden, positions, mask, window).of_rows_out(kept[:, None])
        out = self.head.run(self._target.embed(last.tokens), hidden, attention)
        start.add_((kept + 1) * is_open)
        return out[:, 0]

    def _last_seen(self, num_rows: int, position: Tensor) -> Tensor:
        """The last committed slot that a query at a position sees, [row]."""
        if self._key_mask is KeyMask.CAUSAL:
            return position
        return self._prompt[:num_rows] - 2

    def _visible(self, last: Tensor) -> Tensor:
        """Slots up to the `last` [row, query] of every query, [row, query, slot]."""
        return torch.arange(self._room, device=last.device) <= last[:, :, None]

    def _read(self, level: Level, hidden: Tensor, position: Tensor, seen: Tensor) -> Tensor:
        """The head's output at open nodes, [row, node, width], from `hidden` at their parents."""
        ancestors = level.ancestors
        num_rows, width = level.tokens.shape
        slot = self._room + ancestors.shape[2] - width
        committed = self._visible(seen[:, None]).expand(-1, width, -1)
        if self._key_mask is KeyMask.PREFIX_ONLY:
            ancestors = torch.zeros_like(ancestors)
        positions = (position + level.depth - 1)[:, None].expand(-1, width)
        mask = torch.cat((committed, ancestors), dim=2)[:, None]
        window = self._cache.open(num_rows, width, read=slot + width, start=slot)
        attention = self.head.attend(hidden, positions, mask, window)
        return self.head.run(self._target.embed(level.tokens), hidden, attention)

    def _log_probs(self, hidden: Tensor) -> Tensor:
        return self._target.logits(hidden, self._drafted).log_softmax(dim=-1)


class MedusaDrafts(DraftSource):
    """A tree from parallel heads, whose scores depend on the depth alone."""

    kind = kinds.MEDUSA
    needs = frozenset({HIDDEN})
    capturable = True

    def __init__(self, heads: MedusaHeads, target: Target) -> None:
        self._heads, self._target = heads, target

    def draft(self, batch: Batch, limits: DraftLimits) -> DraftTree:
        """Branch as EAGLE-2 does."""
        assert batch.last is not None
        hidden, num = batch.last.hidden, batch.last.num
        assert hidden is not None
        seen = take_rows(hidden, num[:, None])[:, 0]  # it has predicted the root
        num_heads, shape = self._heads.num_heads, limits.shape
        # There are no more levels than heads, even where the shape is of full depth.
        depth = num_heads if shape.is_full_depth else min(num_heads, limits.depth)
        shape = replace(shape, is_full_depth=False).cut(depth)
        drafted = self._target.action_tokens
        ahead = self._target.logits(self._heads(seen)[:, : shape.levels], drafted)
        ahead = ahead.log_softmax(dim=-1)

        def extend(level: Level) -> Tensor:
            return ahead[:, level.depth, None].expand(-1, level.tokens.shape[1], -1)

        return self.grow(batch, limits.roots, shape, ahead[:, 0], extend, drafted.first)
