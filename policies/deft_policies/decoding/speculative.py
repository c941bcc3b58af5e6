"""Draft, verify, commit, repeat: decoding a batch of actions with as few target passes as it takes.

The first pass is the prefill, with guesses riding behind the prompt. Every pass commits the drafts
it accepted and one token of the target's own, so an action ends when its last token is known and
never has one more. Plain decoding is this loop with trees that are only a root.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deft_policies.decoding.acceptance.rule import ActionContext, ScoredTree
from deft_policies.decoding.drafts.sources import BatchDrafts
from deft_policies.decoding.records import (
    ActionRun,
    BatchProgress,
    PassRecord,
    PassResult,
    Stage,
    StageClock,
)
from deft_policies.decoding.sampling import all_finite, first_maximum, top_gap
from deft_policies.decoding.target import PromptFeatures, Prompts, Scores, TargetModel
from deft_policies.decoding.tree import DraftTree
from deft_policies.decoding.verify import AcceptedPath, Verifier


def run_actions(
    state: "RunState", prompts: Prompts, drafts: BatchDrafts, clock: StageClock
) -> ActionRun:
    """Decode one batch to the end."""
    tree = drafts.before_prefill(state.progress(prompts.last_tokens))
    draft_lap = clock.lap(Stage.DRAFT)
    scores, features = state.target.prefill(prompts, tree)
    pass_lap = clock.lap(Stage.PREFILL)
    result = state.verify(tree, scores, features)
    records = [PassRecord(result, pass_lap, clock.lap(Stage.JUDGE), draft_lap)]
    if not state.is_done:
        drafts.begin(features)
    while not state.is_done:
        state.commit(result)
        commit_lap = clock.lap(Stage.COMMIT)
        tree = drafts.between_passes(state.progress(result.accepted.bonus))
        draft_lap = clock.lap(Stage.DRAFT)
        scores = state.target.score(tree)
        pass_lap = clock.lap(Stage.VERIFY)
        result = state.verify(tree, scores)
        judge_lap = clock.lap(Stage.JUDGE)
        records.append(PassRecord(result, pass_lap, judge_lap, draft_lap, commit_lap))
    return state.finish(records)


class RunState:
    """One batch of actions on its way. Owns every tensor that changes from pass to pass."""

    def __init__(
        self,
        target: TargetModel,
        verifier: Verifier,
        context: ActionContext,
        wants_margins: bool = False,
    ) -> None:
        """`wants_margins` costs a search through the logits of every path."""
        self.wants_margins = wants_margins
        self.target = target
        self.verifier = verifier
        self.context = context
        num_rows, self.length = context.space.groups.shape
        device = context.space.groups.device
        # One column more than an action has: what overshoots is written there and never read.
        self.tokens = torch.zeros(num_rows, self.length + 1, dtype=torch.int64, device=device)
        self.own = torch.zeros_like(self.tokens)
        self.num_committed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.counts = [0] * num_rows  # what the host knows of num_committed
        self.last: PassResult | None = None
        self._longest_path = 1
        self._written: list[tuple[Tensor, Tensor]] = []
        self._sums: list[Tensor] = []  # of all logits, [row] for each pass

    @property
    def is_done(self) -> bool:
        """True once every row has its last token."""
        return min(self.counts) >= self.length

    def progress(self, roots: Tensor) -> BatchProgress:
        """What draft sources may see."""
        return BatchProgress(
            self.tokens, self.num_committed, roots, min(self.counts), self.length, self.last
        )

    def verify(
        self, tree: DraftTree, scores: Scores, features: PromptFeatures | None = None
    ) -> PassResult:
        """Judge a pass and write down what it commits. The prefill has `features`."""
        if features is not None and self.verifier.rule.needs_patches:
            patches = features.hidden[:, features.patches]
            self.context = replace(self.context, patches=patches)
        self._sums.append(scores.logits.sum(dim=(1, 2)))
        predictions = self.verifier.predict(tree, scores, self.num_committed)
        accepted = self.verifier.judge(self._scored(tree, scores, predictions))
        self.last = PassResult(
            tree=tree,
            scores=scores,
            predictions=predictions,
            accepted=accepted,
            next_tokens=_next_tokens(tree, accepted),
            num_committed=self.num_committed,
            is_open=tuple(count < self.length for count in self.counts),
            is_prefill=features is not None,
        )
        self._write(self.last)
        return self.last

    def _scored(self, tree: DraftTree, scores: Scores, predictions: Tensor) -> ScoredTree:
        return ScoredTree(
            tree=tree,
            scores=scores,
            predictions=predictions,
            num_committed=self.num_committed,
            spent=self.tokens[:, : self.length] - self.own[:, : self.length],
            vocabulary=self.target.vocabulary,
            action_tokens=self.target.action_tokens,
            context=self.context,
            num_tokens=self.target.num_tokens,
        )

    def _places(self, accepted: Tensor, num_steps: int) -> Tensor:
        """Where the tokens of a pass belong, [row, step]; the spare column for what is none."""
        if num_steps == 1:
            return self.num_committed[:, None]
        steps = torch.arange(num_steps, device=accepted.device)
        places = self.num_committed[:, None] + steps
        places = places.masked_fill_(steps > accepted[:, None], self.length)
        return places.clamp_(max=self.length)

    def _write(self, result: PassResult) -> None:
        """Append what was committed."""
        path, accepted = result.accepted.path, result.accepted.num_accepted
        places = self._places(accepted, path.shape[1])
        self.tokens.scatter_(1, places, result.next_tokens)
        self.own.scatter_(1, places, result.accepted.own)
        if self.wants_margins:  # a copy: a captured pass overwrites its logits when it runs again
            self._written.append((_at_path(result.scores.logits, path), places))
        self.num_committed = (self.num_committed + accepted + 1).clamp_(max=self.length)
        # Where nothing was guessed the host knows what was committed without reading.
        kept = [0] * len(self.counts) if path.shape[1] == 1 else self.read_from_device(accepted)
        self._longest_path = max(kept) + 1
        self.counts = [
            min(count + num + 1, self.length) for count, num in zip(self.counts, kept, strict=True)
        ]

    def read_from_device(self, accepted: Tensor) -> list[int]:
        """The one read in a round, and so the one place where the host waits for the device."""
        lengths: list[int] = accepted.tolist()
        return lengths

    def commit(self, result: PassResult) -> None:
        """Keep the path in the target's cache; rows that are finished keep nothing more."""
        kept = result.accepted.num_accepted + 1
        if not all(result.is_open):
            kept = kept * (result.num_committed < self.length)
        self.target.commit(result.accepted.path[:, : self._longest_path], kept)

    def finish(self, records: Sequence[PassRecord]) -> ActionRun:
        """Everything that was settled."""
        margins = self._margins() if self.wants_margins else None
        length = self.length
        return ActionRun(
            self.tokens[:, :length],
            self.own[:, :length],
            margins,
            all_finite(self._sums),
            tuple(records),
        )

    def _margins(self) -> Tensor:
        """Top-2 gaps of the logits along every path, in one call over all passes."""
        logits = torch.cat([logits for logits, _ in self._written], dim=1)
        gaps = top_gap(logits, first_maximum(logits))
        places = torch.cat([places for _, places in self._written], dim=1)
        margins = torch.zeros(self.tokens.shape, device=gaps.device)
        margins.scatter_(1, places, gaps)
        return margins[:, : self.length]


def _next_tokens(tree: DraftTree, accepted: AcceptedPath) -> Tensor:
    """The token after each node of the path: the next draft on it, or the bonus. [row, step]."""
    bonus = accepted.bonus[:, None]
    if accepted.path.shape[1] == 1:
        return bonus
    drafted = tree.tokens.gather(1, accepted.path[:, 1:])
    shifted = torch.cat((drafted, bonus), dim=1)
    return shifted.scatter_(1, accepted.num_accepted[:, None], bonus)


def _at_path(values: Tensor, path: Tensor) -> Tensor:
    """Pick the nodes [row, step] of a path from [row, node, ...]."""
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    return values[rows, path]
