"""Token recycling: what the target last said after a token is how that token goes on.

No model. A table remembers, token by token, what the target answered there, candidates that were
rejected included, and a tree is read off it (Luo et al. 2025). It starts from the session's actions
and ends with the action, so that the same session drafts the same again on any machine.
"""

import torch
from torch import Tensor

from deft_policies.decoding.drafts.growth import GrowthStart, OpenNodes, grow_tree
from deft_policies.decoding.drafts.sources import Seen
from deft_policies.decoding.history import HistoryTensors
from deft_policies.decoding.plan import DraftKind, TreeShape
from deft_policies.decoding.records import BatchProgress, PassResult
from deft_policies.decoding.target import PromptFeatures, TargetModel
from deft_policies.decoding.tree import DraftTree

_NEVER_SEEN = -100.0


class TokenRecycling:
    """A grower over a table [row, token, next token] of log-probabilities, of action tokens alone.

    What followed a token in the session stands in it as if it had been said with certainty, less
    one for every step that has passed since. The paper keeps the 8 likeliest candidates of a token;
    the shape of the tree decides here.
    """

    kind = DraftKind.TOKEN_RECYCLING
    needs_hidden = False
    steps_needed = 16

    def __init__(self, target: TargetModel) -> None:
        self._tokens = target.action_tokens
        self._first_column = target.action_tokens.first - target.vocabulary.first
        self._table: Tensor | None = None

    def begin(self, seen: Seen, features: PromptFeatures) -> None:
        """Fill the table from what the session's target answered."""
        self._table = self._remembered(seen.history)

    def warm_up(self, shape: TreeShape, length: int) -> None:
        """Nothing is captured here."""

    @torch.no_grad()
    def grow(self, progress: BatchProgress, shape: TreeShape) -> DraftTree:
        """Take the answers of the last pass in, and read a tree off the table."""
        if progress.last is None or self._table is None:
            raise ValueError("tokens are recycled after the prefill")
        self._table = table = self._with_answers(self._table, progress.last)
        rows = torch.arange(len(table), device=table.device)[:, None]

        def after(tokens: Tensor) -> Tensor:
            return table[rows, (tokens - self._tokens.first).clamp(0, len(self._tokens) - 1)]

        def go_on(nodes: OpenNodes) -> Tensor:
            return after(nodes.tokens)

        deepest = progress.length - 1 - progress.num_committed
        if shape.is_full_depth:
            deepest = torch.full_like(deepest, shape.levels)
        first = after(progress.roots[:, None])[:, 0]
        start = GrowthStart(self.kind, progress.roots, first, deepest, self._tokens.first)
        return grow_tree(shape.cut(progress.depth), start, go_on)

    def _remembered(self, history: HistoryTensors) -> Tensor:
        """The newest of what followed a token in any step counts most."""
        num_rows, num_steps, length = history.own.shape
        size = len(self._tokens)
        steps = torch.arange(num_steps, device=history.own.device)
        age = (num_steps - 1 - steps)[None, :, None].expand(num_rows, -1, length - 1)
        pairs = (history.own[:, :, :-1], history.own[:, :, 1:])
        before, behind = ((one - self._tokens.first) for one in pairs)
        is_known = (age < history.num_known[:, None, None]) & (before >= 0) & (before < size)
        is_known = is_known & (behind >= 0) & (behind < size)
        places = torch.where(is_known, before * size + behind, 0)
        scores = torch.where(is_known, -age.float(), _NEVER_SEEN)
        table = scores.new_full((num_rows, size * size), _NEVER_SEEN)
        table = table.scatter_reduce(1, places.flatten(1), scores.flatten(1), "amax")
        return table.view(num_rows, size, size)

    def _with_answers(self, table: Tensor, last: PassResult) -> Tensor:
        """What a pass says after a token replaces what was known of it; the larger of two."""
        assert last.scores is not None  # no round of this source is recorded
        columns = slice(self._first_column, self._first_column + len(self._tokens))
        said = last.scores.logits[:, :, columns].log_softmax(dim=2)
        tokens = last.tree.tokens - self._tokens.first
        is_told = last.tree.is_real & (tokens >= 0) & (tokens < len(self._tokens))
        # What is no action token is written to a row behind the table.
        places = torch.where(is_told, tokens, len(self._tokens))[:, :, None].expand_as(said)
        fresh = said.new_full((len(said), len(self._tokens) + 1, said.shape[2]), -torch.inf)
        fresh = fresh.scatter_reduce(1, places, said, "amax")[:, :-1]
        return torch.where(fresh > -torch.inf, fresh, table)
