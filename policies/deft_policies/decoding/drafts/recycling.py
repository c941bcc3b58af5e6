"""Token recycling (Luo et al. 2025): a tree read off a table of what followed each token."""

import torch
from torch import Tensor

from deft_policies.decoding import kinds
from deft_policies.decoding.batch import Batch, Pass
from deft_policies.decoding.drafts.base import LOGITS, MEMORY, DraftSource
from deft_policies.decoding.target import Prompts, Target
from deft_policies.decoding.tree import DraftLimits, DraftTree, Level

_NEVER_SEEN = -100.0


class TokenRecycling(DraftSource):
    """A tree read off a table of what the target last predicted after each token.

    The table [row, token, next token] holds log-probabilities, of action tokens alone, candidates
    that were rejected included (Luo et al. 2025). It starts from the session's actions and ends
    with the answer, so that the same session drafts the same again on any machine. What followed a
    token in the session counts as certain, less one for every step that has passed since.
    """

    kind = kinds.TOKEN_RECYCLING
    needs = frozenset({MEMORY, LOGITS})
    capturable = True
    _steps = 16

    def __init__(self, target: Target) -> None:
        self._tokens = target.action_tokens
        self._table = torch.zeros(0)

    def allocate(self, batch: Batch) -> None:
        """A table for every row."""
        size = len(self._tokens)
        with torch.inference_mode(False):
            self._table = torch.zeros(batch.capacity, size, size, device=batch.device)

    def begin(self, batch: Batch, prompts: Prompts, hidden: Tensor | None) -> None:
        """Fill the table from what the session's target answered."""
        here = slice(batch.first, batch.first + batch.num_rows)
        self._table[here] = self._remembered(batch)

    def draft(self, batch: Batch, limits: DraftLimits) -> DraftTree:
        """Take the answers of the last pass in, and read a tree off the table."""
        assert batch.last is not None
        table = self._table[: batch.num_rows]
        table.copy_(self._with_answers(table, batch.last))
        rows = torch.arange(len(table), device=table.device)[:, None]

        def after(tokens: Tensor) -> Tensor:
            return table[rows, (tokens - self._tokens.first).clamp(0, len(self._tokens) - 1)]

        def extend(level: Level) -> Tensor:
            return after(level.tokens)

        shape, first = limits.shape.cut(limits.depth), after(limits.roots[:, None])[:, 0]
        return self.grow(batch, limits.roots, shape, first, extend, self._tokens.first)

    def _remembered(self, batch: Batch) -> Tensor:
        """The newest of what followed a token in any step counts most."""
        own = batch.past[:, -self._steps :]
        num_rows, num_steps, length = own.shape
        size = len(self._tokens)
        steps = torch.arange(num_steps, device=own.device)
        age = (num_steps - 1 - steps)[None, :, None].expand(num_rows, -1, length - 1)
        before, behind = (one - self._tokens.first for one in (own[:, :, :-1], own[:, :, 1:]))
        is_known = (age < batch.num_past[:, None, None]) & (before >= 0) & (before < size)
        is_known = is_known & (behind >= 0) & (behind < size)
        places = torch.where(is_known, before * size + behind, 0)
        scores = torch.where(is_known, -age.float(), _NEVER_SEEN)
        table = scores.new_full((num_rows, size * size), _NEVER_SEEN)
        table = table.scatter_reduce(1, places.flatten(1), scores.flatten(1), "amax")
        return table.view(num_rows, size, size)

    def _with_answers(self, table: Tensor, last: Pass) -> Tensor:
        """What a pass predicts after a token replaces what was known of it; the larger of two."""
        assert last.logits is not None
        found = last.logits.log_softmax(dim=2)
        tokens = last.tree.tokens - self._tokens.first
        is_known = last.tree.is_real & (tokens >= 0) & (tokens < len(self._tokens))
        # What is no action token is written to a row behind the table.
        places = torch.where(is_known, tokens, len(self._tokens))[:, :, None].expand_as(found)
        fresh = found.new_full((len(found), len(self._tokens) + 1, found.shape[2]), -torch.inf)
        fresh = fresh.scatter_reduce(1, places, found, "amax")[:, :-1]
        return torch.where(fresh > -torch.inf, fresh, table)
