"""A round: one target pass over the rows of a batch. Draft, verify, accept, commit.

`Round.play` is that, in the paper's order. The first pass of a row is its prefill, with the guesses
that need no model behind the prompt. Every pass commits the drafts it accepted and one token of the
target's, so an answer ends when its last token is known and never has one more.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deft_policies.decoding.acceptance.rule import ExactMatch, ScoredTree
from deft_policies.decoding.batch import Batch, Pass
from deft_policies.decoding.clock import Stage
from deft_policies.decoding.drafts import HIDDEN, LOGITS, DraftSource
from deft_policies.decoding.judge import judge, judge_on_host, predict
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import Plan
from deft_policies.decoding.sampling import first_maximum, top_gap
from deft_policies.decoding.target import Prompts, Scores, Target
from deft_policies.decoding.tree import DraftLimits, DraftTree, merge
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.llama import take_rows

Played = tuple[Tensor, int, int]  # a pass as the host may read it, its nodes and its steps
BookTime = Callable[[Stage], object]


class Round:
    """Plays a pass of a batch's rows by one method and plan, on their tensors alone."""

    def __init__(
        self, target: Target, batch: Batch, method: Method, plan: Plan, needs: Collection[str]
    ) -> None:
        """`needs` says what the draft sources read of a pass."""
        self.target, self.batch, self.method, self.plan = target, batch, method, plan
        self.keeps_hidden, self._keeps_logits = HIDDEN in needs, LOGITS in needs
        self._judges_on_host = target.reads_lengths and isinstance(method.rule, ExactMatch)

    def play(
        self,
        rows: Batch,
        drafts: Sequence[DraftSource],
        depth: int,
        lap: BookTime = lambda stage: None,
        tree: DraftTree | None = None,
    ) -> Played:
        """Draft behind what was accepted, verify the drafts, accept some, commit them."""
        rows.last = last = rows.last_pass()
        if tree is None:
            tree = self.draft(rows, drafts, depth, last.bonus)
            lap(Stage.DRAFT)
        tree = replace(tree, answers=last.answers)
        self._keep(rows, last)
        lap(Stage.COMMIT)
        scores = self._penalised(rows, tree, self.target.score(self._cache, tree))
        lap(Stage.VERIFY)
        played = self._commit(rows, self._accept(rows, tree, scores, depth), scores.logits)
        lap(Stage.JUDGE)
        return played

    def prefill(
        self,
        rows: Batch,
        drafts: Sequence[DraftSource],
        prompts: Prompts,
        depth: int,
        lap: BookTime,
    ) -> tuple[Played, Tensor]:
        """The same as the first pass of rows: the prompts, with drafts behind them.

        Also returns the prompts' hidden states, where they are kept: see `Target.prefill`.
        """
        tree = self.draft(rows, drafts, depth, prompts.last_tokens)
        tree = replace(tree, answers=rows.answers)
        lap(Stage.DRAFT)
        scores, hidden = self.target.prefill(self._cache, rows.first, prompts, tree)
        if prompts.seen is not None:
            rows.keep("seen", prompts.seen, prompts.seen.shape[1])
        scores = self._penalised(rows, tree, scores)
        lap(Stage.PREFILL)
        if self.method.rule.needs_patches:
            patches = hidden[:, prompts.patches]
            rows.keep("patches", patches, patches.shape[1])
        played = self._commit(rows, self._accept(rows, tree, scores, depth), scores.logits)
        lap(Stage.JUDGE)
        return played, hidden

    def draft(
        self, rows: Batch, drafts: Sequence[DraftSource], depth: int, roots: Tensor
    ) -> DraftTree:
        """One tree of what all sources guess."""
        shape = self.plan.shape
        if not drafts or (depth <= 0 and not shape.is_full_depth):
            return rows.root_tree(roots)
        limits = DraftLimits(roots, shape, depth, self.batch.widest)
        found = [(one.kind, one.draft(rows, limits)) for one in drafts]
        return merge(found, limits, trims=self.target.reads_lengths)

    def _keep(self, rows: Batch, last: Pass) -> None:
        """Keep in the cache what the last pass has accepted."""
        is_captured = self.batch.longest > 0
        kept: Tensor | int = last.num + 1 if is_captured or last.tree.num_nodes > 1 else 1
        if is_captured or None in rows.rows:  # those that have ended keep nothing more
            kept = kept * rows.is_open
        self._cache.keep(last.path, kept, last.tree.is_chain or not self.plan.kinds)

    def _penalised(self, rows: Batch, tree: DraftTree, scores: Scores) -> Scores:
        """With less for what came before; the root is the last token that did."""
        if (seen := rows.seen) is None:
            return scores
        return replace(scores, logits=self.target.penalise(scores.logits, seen, tree))

    def _accept(self, rows: Batch, tree: DraftTree, scores: Scores, depth: int) -> Pass:
        """What the target says after each node, and which path is committed.

        `target_tokens` are greedy, even where tokens are drawn: whatever drafted, sessions remember
        the same.
        """
        method, logits, first = self.method, scores.logits, self.target.vocabulary.first
        tokens = predict(method, tree, logits, first, rows.keys, rows.count)
        assert scores.answers is not None
        if tree.num_nodes == 1:
            root = rows.root_path, rows.none_kept
            done = Pass(tree, tokens, *root, tokens[:, 0], tokens, tokens, scores.answers)
        else:
            steps = max(1, min(tree.num_nodes, depth + 1, rows.positions))
            if self._judges_on_host and (tree.odds is None or method.temperature == 0.0):
                stop, room = rows.stop if rows.has_text else None, rows.limit - 1 - rows.count
                done = judge_on_host(tree, tokens, scores.answers, room, stop, steps)
            else:
                done = judge(method, self._scored(rows, tree, scores, tokens), rows.keys, steps)
        if method.temperature > 0.0:
            greedy = first_maximum(logits) + first
            done = replace(done, target_tokens=greedy.gather(1, done.path))
        if self.keeps_hidden:
            done = replace(done, hidden=take_rows(scores.hidden, done.path))
        if self._keeps_logits:
            bins = self.target.action_tokens.within(self.target.vocabulary)
            done = replace(done, logits=logits[:, :, bins])
        return done

    def _scored(
        self, rows: Batch, tree: DraftTree, scores: Scores, predictions: Tensor
    ) -> ScoredTree:
        """The tree with everything that a rule may read."""
        has_text = rows.has_text
        return ScoredTree(
            tree=tree,
            scores=scores,
            predictions=predictions,
            num_committed=rows.count,
            spent=rows.spent(),
            vocabulary=self.target.vocabulary,
            action_tokens=self.target.action_tokens,
            context=rows.context(),
            num_tokens=self.target.num_tokens,
            limit=rows.limit,
            begin=rows.begin if has_text else None,
            stop=rows.stop if has_text else None,
            written=rows.written() if self.method.rule.reads_numbers else (),
        )

    def _commit(self, rows: Batch, done: Pass, logits: Tensor) -> Played:
        """Write down what a pass has decided: for the next round, and for the host."""
        played = done.for_host(), *done.size  # a copy, before its root is overwritten
        rows.commit(done, is_plain=not self.plan.rounds)
        rows.sums.add_(logits.sum(dim=(1, 2)))
        if rows.seen is not None:
            rows.note_seen(done)
        wants_margins = any(row is not None and row.wants_margins for row in rows.rows)
        wants_log_probs = any(row is not None and row.wants_log_probs for row in rows.rows)
        is_known = not self.plan.kinds and self.method.temperature == 0.0
        if is_known and not wants_margins and not wants_log_probs:
            return played
        places = _places_of(rows, done)
        rows.tokens.scatter_(1, places, done.tokens)
        rows.target_tokens.scatter_(1, places, done.target_tokens)
        if wants_margins:
            found = take_rows(logits, done.path)
            rows.margins.scatter_(1, places, top_gap(found, first_maximum(found)))
        if wants_log_probs:
            rows.log_probs.scatter_(1, places, self._log_probs(done, logits))
        if rows.has_text and not self.method.rule.is_exact:
            self._note_text(rows, done)
        rows.count.add_(done.num + 1)
        if rows.num_rows > 1 or self.batch.longest:  # some may have ended before
            torch.minimum(rows.count, rows.limit, out=rows.count)
        return played

    def _log_probs(self, done: Pass, logits: Tensor) -> Tensor:
        """Of the tokens after each node of the path, under the target: [row, step]."""
        found = take_rows(logits, done.path) / (self.method.temperature or 1.0)
        # Steps beyond what was kept hold anything.
        columns = (done.tokens - self.target.vocabulary.first).clamp(0, found.shape[2] - 1)
        return found.log_softmax(dim=2).gather(2, columns[:, :, None]).squeeze(2)

    def _note_text(self, rows: Batch, done: Pass) -> None:
        """Where the action begins that the next token may belong to: behind the last text."""
        steps = torch.arange(1, done.tokens.shape[1] + 1, device=rows.device)
        is_text = ~self.target.action_tokens.contains(done.tokens)
        last = (steps * (is_text & (steps <= done.num[:, None] + 1))).amax(dim=1)
        is_moved = (last > 0) & (rows.begin >= 0)
        rows.begin.copy_(torch.where(is_moved, rows.count + last, rows.begin))

    @property
    def _cache(self) -> KVCache:
        assert self.batch.cache is not None
        return self.batch.cache


def _places_of(rows: Batch, done: Pass) -> Tensor:
    """Where the tokens of a pass belong, [row, step]; the spare column for what is none."""
    steps = done.path.shape[1]
    if steps == 1:
        return rows.count[:, None].clamp(max=rows.positions)
    numbers = torch.arange(steps, device=rows.device)
    places = rows.count[:, None] + numbers
    places = places.masked_fill_(numbers > done.num[:, None], rows.positions)
    return places.clamp_(max=rows.positions)
