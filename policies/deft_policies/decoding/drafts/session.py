"""Sources that draft from what is remembered of the session and of the last pass."""

import torch
from torch import Tensor

from deft_policies.decoding import kinds
from deft_policies.decoding.batch import Batch, Pass
from deft_policies.decoding.drafts import LOGITS, MEMORY, DraftSource, remaining_tokens
from deft_policies.decoding.target import Prompts, Target
from deft_policies.decoding.tree import Chains, DraftLimits, DraftTree, Level
from deft_policies.model.sizes import TokenRange

_NEVER_SEEN = -100.0


class PreviousAction(DraftSource):
    """The action will be the target's own last one."""

    kind = kinds.PREVIOUS
    needs = frozenset({MEMORY})
    capturable = True
    least_steps = 1

    def draft(self, batch: Batch, limits: DraftLimits) -> Chains:
        """Repeat the newest step."""
        tokens = batch.past[:, -1:]
        return remaining_tokens(batch, tokens, _with_steps(batch, 1).expand_as(tokens), limits)


def _with_steps(batch: Batch, num_steps: int) -> Tensor:
    """Rows that remember so many actions, [row, 1, 1]."""
    return (batch.num_past >= num_steps)[:, None, None]


class Extrapolation(DraftSource):
    """The action will continue the straight line through the last two: a + (a - b), in bins.

    Guesses stay inside the action tokens; a session with fewer steps gets none.
    """

    kind = kinds.EXTRAPOLATION
    needs = frozenset({MEMORY})
    capturable = True
    least_steps = 2

    def __init__(self, action_tokens: TokenRange) -> None:
        self._tokens = action_tokens

    def draft(self, batch: Batch, limits: DraftLimits) -> Chains:
        """Evaluate the line one step ahead."""
        before, newest = batch.past[:, -2:-1], batch.past[:, -1:]
        tokens = (2 * newest - before).clamp(self._tokens.first, self._tokens.last)
        # A position that held something else than a bin is not on any line: repeat it.
        is_bin = self._tokens.contains(before) & self._tokens.contains(newest)
        tokens = torch.where(is_bin, tokens, newest)
        return remaining_tokens(batch, tokens, _with_steps(batch, 2).expand_as(tokens), limits)


class NgramLookup(DraftSource):
    """The action will go on as it did when the same tokens came before (prompt-lookup decoding).

    The session's own answers are one long sequence. The last three tokens (fewer if those never
    occurred) are looked up at the same phase of an earlier action, newest first, and what followed
    them there is the guess. Tokens of different positions are never mixed.
    """

    kind = kinds.NGRAM
    needs = frozenset({MEMORY})
    capturable = True
    least_steps = 1
    _longest = 3
    _steps = 16  # how far it looks back

    def draft(self, batch: Batch, limits: DraftLimits) -> Chains:
        """Compare the tail of the sequence with every earlier action at the same phase."""
        return remaining_tokens(batch, *self.look_up(batch, batch.tokens, batch.count), limits)

    def look_up(self, batch: Batch, committed: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Whole actions [row, 1, place] and what is known of them, given the first `count`."""
        own = batch.past[:, -self._steps :]
        num_rows, num_steps, length = own.shape
        lengths = batch.limit.clamp(max=length)  # rows may have shorter actions than there is room
        stream = torch.cat((own.flatten(1), committed[:, :length]), dim=1)
        end = num_steps * length + count  # where the next token goes, [row]
        steps = torch.arange(num_steps, device=end.device)
        back = torch.arange(1, self._longest + 1, device=end.device)
        # ends[row, step]: the same phase in an earlier action; places[row, step, n]: n before it.
        ends = steps * length + count[:, None]
        gap = length - lengths  # skipped where the tail reaches into the action before
        reach = (back > count[:, None]) * gap[:, None]
        places = ends[:, :, None] - back - reach[:, None, :]
        last = stream.shape[1] - 1  # a text goes on behind the places of an action
        tail = stream.gather(1, (end[:, None] - back - reach).clamp(0, last))
        flat = places.clamp(0, last).flatten(1)
        earlier = stream.gather(1, flat).view(num_rows, num_steps, self._longest)
        first_known = ((num_steps - batch.num_past).clamp(min=0) * length)[:, None]
        same = (earlier == tail[:, None]) & (places >= first_known[:, :, None])
        matched = same.long().cummin(dim=2).values.sum(dim=2)  # tokens matched, [row, step]
        # The longest match wins, then the newest.
        score = (matched * num_steps + steps + 1) * ((ends >= first_known) & (matched > 0))
        best = score.argmax(dim=1)
        tokens = own[torch.arange(num_rows, device=end.device), best][:, None]
        is_known = (score.amax(dim=1) > 0) & (count < lengths)
        return tokens, is_known[:, None, None].expand_as(tokens)


class JacobiDrafts(DraftSource):
    """The target's predictions after its last mismatch (Jacobi iteration).

    Its predictions along the rejected rest of the best chain were made after one wrong token; they
    are often right all the same, and they cost nothing.
    """

    kind = kinds.RECYCLED
    needs = frozenset({LOGITS})
    capturable = True

    def draft(self, batch: Batch, limits: DraftLimits) -> Chains:
        """Read the predictions below the path along its deepest real continuation."""
        last = batch.last
        assert last is not None
        tree, rows = last.tree, torch.arange(batch.num_rows, device=batch.device)
        ancestors, depths = tree.ancestor_mask(), tree.depths()
        end = last.path.gather(1, last.num[:, None]).squeeze(1)
        below = ancestors[rows, :, end] & tree.is_real  # nodes at or below the path's end
        leaf = depths.masked_fill(~below, -1).argmax(dim=1)
        on_path = ancestors[rows, leaf] & below  # from the path's end to the leaf
        # The prediction at the path's end is the root; one at depth d below it is guess d - 1.
        steps = depths - last.num[:, None] - 1
        is_guess = on_path & (steps >= 0) & (steps < limits.depth)
        is_guess &= batch.count[:, None] + steps < batch.limit[:, None] - 1
        steps = steps.masked_fill(~is_guess, limits.depth)
        tokens = torch.zeros(
            batch.num_rows, limits.depth + 1, dtype=torch.int64, device=batch.device
        )
        known = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, steps, is_guess)
        tokens = tokens.scatter(1, steps, last.predictions)
        here = slice(limits.depth)
        return Chains(tokens[:, None, here], known[:, None, here])


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
        self._table[batch.slots] = self._remembered(batch)

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

        first = after(limits.roots[:, None])[:, 0]
        shape = limits.shape.cut(limits.depth)
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
