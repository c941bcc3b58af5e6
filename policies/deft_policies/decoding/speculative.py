"""Draft, verify, commit, repeat: decoding a batch of actions with as few target passes as it takes.

The first pass is the prefill, with guesses riding behind the prompt. Every pass commits the drafts
it accepted and one token of the target's own, so an action ends when its last token is known and
never has one more. Plain decoding is this loop with trees that are only a root.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deft_policies.decoding.acceptance.rule import ActionContext, ScoredTree
from deft_policies.decoding.drafts.sources import BatchDrafts, GivenDrafts
from deft_policies.decoding.records import (
    ActionRun,
    PassReport,
    PassResult,
    Settled,
    Stage,
    StageClock,
)
from deft_policies.decoding.sampling import first_maximum, top_gap
from deft_policies.decoding.target import PromptFeatures, Prompts, Scores, TargetModel
from deft_policies.decoding.tree import DraftTree
from deft_policies.decoding.verify import AcceptedPath, Verifier
from deft_policies.model.layout import FixedMemory, StepRunner, Tensors
from deft_policies.model.leaves import copy_together, leaves, shapes_of, with_leaves

Lap = Callable[[Stage], object]


def run_actions(rounds: "Rounds", prompts: Prompts, run: ActionRun, clock: StageClock) -> ActionRun:
    """Decode one batch to the end."""
    clock.take_laps()  # what came before, as seeing, is no pass
    tree = rounds.first_drafts(prompts)
    clock.lap(Stage.DRAFT)
    features = rounds.prefill(prompts, tree, clock.lap)
    run.take(rounds.report(), clock)
    if not run.is_done:
        rounds.begin(features)
    while not run.is_done:
        run.take(rounds.play(run.fewest, clock.lap), clock)
    run.margins = rounds.margins
    return run


@dataclass(frozen=True)
class Round:
    """What happens in a round, as a function of tensors.

    What its target and its growers keep besides lies in memory that does not move.
    """

    target: TargetModel
    drafts: BatchDrafts
    verifier: Verifier
    context: ActionContext

    @property
    def given(self) -> "Given":
        """The tensors that differ from batch to batch."""
        return Given(self.verifier, self.context, self.drafts.given)

    def over(self, given: "Given") -> "Round":
        """The same round where those lie elsewhere."""
        drafts = self.drafts.over(given.drafts)
        return Round(self.target, drafts, given.verifier, given.context)

    def having_seen(self, features: PromptFeatures) -> "Round":
        """With what the rule reads of the prompt."""
        if not self.verifier.rule.needs_patches:
            return self
        patches = features.hidden[:, features.patches]
        return replace(self, context=replace(self.context, patches=patches))

    def play(self, settled: Settled, fewest: int, lap: Lap) -> Settled:
        """Commit what was accepted, draft behind it, verify the drafts."""
        last = settled.last
        assert last is not None
        kept = last.accepted.num_accepted + 1
        # Rows that are finished keep nothing more.
        self.target.commit(last.accepted.path, kept * (last.num_committed < settled.length))
        lap(Stage.COMMIT)
        tree = self.drafts.between_passes(settled.progress(last.accepted.bonus, fewest))
        lap(Stage.DRAFT)
        scores = self.target.score(tree)
        lap(Stage.VERIFY)
        settled = self.verify(settled, tree, scores)
        lap(Stage.JUDGE)
        return settled

    def verify(
        self, settled: Settled, tree: DraftTree, scores: Scores, is_prefill: bool = False
    ) -> Settled:
        """Judge a pass and write down what it commits."""
        predictions = self.verifier.predict(tree, scores, settled.num_committed)
        accepted = self.verifier.judge(self._scored(settled, tree, scores, predictions))
        path, next_tokens = accepted.path, _next_tokens(tree, accepted)
        places = _places(settled, accepted)
        margins = settled.margins
        if margins is not None:
            logits = _at_path(scores.logits, path)
            margins = margins.scatter(1, places, top_gap(logits, first_maximum(logits)))
        num_committed = settled.num_committed + accepted.num_accepted + 1
        return Settled(
            tokens=settled.tokens.scatter(1, places, next_tokens),
            own=settled.own.scatter(1, places, accepted.own),
            num_committed=num_committed.clamp_(max=settled.length),
            sums=settled.sums + scores.logits.sum(dim=(1, 2)),
            margins=margins,
            last=PassResult(
                tree=tree,
                predictions=predictions,
                accepted=accepted,
                next_tokens=next_tokens,
                hidden=_at_path(scores.hidden, path),
                num_committed=settled.num_committed,
                scores=scores,
                is_prefill=is_prefill,
            ),
        )

    def _scored(
        self, settled: Settled, tree: DraftTree, scores: Scores, predictions: Tensor
    ) -> ScoredTree:
        return ScoredTree(
            tree=tree,
            scores=scores,
            predictions=predictions,
            num_committed=settled.num_committed,
            spent=(settled.tokens - settled.own)[:, : settled.length],
            vocabulary=self.target.vocabulary,
            action_tokens=self.target.action_tokens,
            context=self.context,
            num_tokens=self.target.num_tokens,
        )


@dataclass(frozen=True)
class Given:
    """What a batch brings along and its rounds do not change."""

    verifier: Verifier
    context: ActionContext
    drafts: GivenDrafts


class Rounds:
    """The passes of one batch. Where its rounds are recorded, each of them is one launch."""

    def __init__(self, first: Round, settled: Settled, runner: StepRunner) -> None:
        """`runner` records rounds while it is warming up, and replays them afterwards."""
        self._round = first
        self._settled = settled
        self._runner = runner
        self._place: FixedMemory | None = None

    @property
    def recipe(self) -> Hashable:
        """What their drafts have in common with those of other batches."""
        return self._round.drafts.recipe

    @property
    def margins(self) -> Tensor | None:
        """Gaps of the two largest logits, [row, position], where wanted."""
        margins = self._settled.margins
        return None if margins is None else margins[:, : self._settled.length]

    def first_drafts(self, prompts: Prompts) -> DraftTree:
        """The guesses that ride behind the prompt."""
        progress = self._settled.progress(prompts.last_tokens, fewest=0)
        return self._round.drafts.before_prefill(progress)

    def prefill(self, prompts: Prompts, tree: DraftTree, lap: Lap) -> PromptFeatures:
        """The first pass."""
        scores, features = self._round.target.prefill(prompts, tree)
        lap(Stage.PREFILL)
        self._round = self._round.having_seen(features)
        self._settled = self._round.verify(self._settled, tree, scores, is_prefill=True)
        lap(Stage.JUDGE)
        return features

    def report(self) -> PassReport:
        """What the pass that has just ended tells the host."""
        return PassReport.of(self._settled)

    @property
    def length(self) -> int:
        """Tokens of one action."""
        return self._settled.length

    def begin(self, features: PromptFeatures) -> bool:
        """Make ready for rounds, once it is known that there are any; True if they are replayed."""
        drafts = self._round.drafts
        drafts.begin(features)
        if self._runner.reserve is None:
            return False
        self._settled = self._settled.padded(drafts.seen.widest_tree)
        read = (self._round.given, self._settled)
        key = (self._round.target, drafts.recipe, shapes_of(read))
        self._place = self._runner.place(key, leaves(read))
        return self._place is not None

    def play(self, fewest: int, lap: Lap) -> PassReport:
        """One round."""
        if self._place is None:
            self._settled = self._round.play(self._settled, fewest, lap)
            return self.report()
        drafts, place = self._round.drafts, self._place
        grown, depth = drafts.at(self._settled.length - 1 - fewest)

        def step() -> Tensors:
            return self._step(place, fewest)

        table, columns = self._runner.run((place, grown, depth), step, ())
        lap(Stage.VERIFY)
        has_guesses = grown is not None or depth > 0
        # The next round overwrites its report, and the host reads of columns at the end alone.
        return PassReport(table, columns.clone(), drafts.seen.widest_tree, has_guesses)

    def _step(self, place: FixedMemory, fewest: int) -> Tensors:
        """The round that is recorded: from memory that never moves, and back to there."""
        given, settled = with_leaves((self._round.given, self._settled), place.tensors)
        played = self._round.over(given).play(settled, fewest, lambda _: None)
        played = played.padded(self._round.drafts.seen.widest_tree)
        copy_together(leaves(settled), leaves(played))
        report = PassReport.of(settled)
        return report.table, report.columns


def _places(settled: Settled, accepted: AcceptedPath) -> Tensor:
    """Where the tokens of a pass belong, [row, step]; the spare column for what is none."""
    if accepted.path.shape[1] == 1:
        return settled.num_committed[:, None]
    steps = torch.arange(accepted.path.shape[1], device=accepted.path.device)
    places = settled.num_committed[:, None] + steps
    places = places.masked_fill_(steps > accepted.num_accepted[:, None], settled.length)
    return places.clamp_(max=settled.length)


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
