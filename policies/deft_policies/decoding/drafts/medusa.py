"""Medusa (Cai et al. 2024): parallel heads, one for each position ahead."""

from dataclasses import replace

from torch import Tensor

from deft_policies.decoding import kinds
from deft_policies.decoding.batch import Batch
from deft_policies.decoding.drafts.base import HIDDEN, DraftSource
from deft_policies.decoding.target import Target
from deft_policies.decoding.tree import DraftLimits, DraftTree, Level
from deft_policies.model.draft_heads import MedusaHeads
from deft_policies.model.llama import take_rows


class MedusaDrafts(DraftSource):
    """A tree from parallel heads, whose scores depend on the depth alone."""

    kind = kinds.MEDUSA
    needs = frozenset({HIDDEN})
    capturable = True

    def __init__(self, heads: MedusaHeads, target: Target) -> None:
        self._heads, self._target = heads, target

    def draft(self, batch: Batch, limits: DraftLimits) -> DraftTree:
        """Branch as EAGLE-2 does."""
        last = batch.last
        assert last is not None
        assert last.hidden is not None
        seen = take_rows(last.hidden, last.num[:, None])[:, 0]  # it has predicted the root
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
