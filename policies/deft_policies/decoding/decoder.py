"""The way in: join a target model, a method and draft sources, and decode batches of actions."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from deft_client.types import DecodeTrace
from deft_policies.decoding.acceptance.host_waits import find_wait
from deft_policies.decoding.acceptance.rule import (
    ActionContext,
    ActionSpace,
    SpaceTensors,
    common_length,
)
from deft_policies.decoding.autoregressive import AutoregressiveDecoder
from deft_policies.decoding.drafts.eagle import EagleHead
from deft_policies.decoding.drafts.growth import Drawing
from deft_policies.decoding.drafts.guessers import (
    Extrapolation,
    NgramLookup,
    PreviousAction,
    Recycled,
    Retrieval,
    RetrievalIndex,
)
from deft_policies.decoding.drafts.head import DrawnHeadDrafts, HeadDrafts, HeadOptions
from deft_policies.decoding.drafts.medusa import MedusaDrafts, MedusaHeads
from deft_policies.decoding.drafts.small_model import SmallModelDrafts, SmallModelOptions
from deft_policies.decoding.drafts.sources import BatchDrafts, Grower, Guesser, Seen, Sources
from deft_policies.decoding.drafts.token_recycling import TokenRecycling
from deft_policies.decoding.guard import Choice, Guard
from deft_policies.decoding.history import ActionHistory, HistoryTensors
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import (
    DRAFT_SOURCES,
    PLAIN,
    DraftKind,
    KeyMask,
    Loop,
    Plan,
    RopeOffset,
)
from deft_policies.decoding.records import (
    ActionCost,
    ActionRun,
    Settled,
    StageClock,
    cost_of_plain,
)
from deft_policies.decoding.speculative import Round, Rounds, run_actions
from deft_policies.decoding.target import Prompts, TargetModel
from deft_policies.decoding.verify import SampledVerifier, Verifier
from deft_policies.errors import RequestError
from deft_policies.memory import STEPS_KEPT
from deft_policies.model.layout import EagerRunner, StepRunner, pad_batch
from deft_policies.model.leaves import leaves, with_leaves

_WARM_UP_RUNS = 3


@dataclass(frozen=True)
class DecodeRow:
    """One action to decode: the session it belongs to and the space it lives in."""

    history: ActionHistory
    space: ActionSpace


@dataclass(frozen=True)
class DraftModels:
    """What drafts with weights or data of its own; None for what is not there."""

    head: EagleHead | None = None
    rope_offset: RopeOffset = RopeOffset.CORRECT
    key_mask: KeyMask = KeyMask.CAUSAL
    medusa: MedusaHeads | None = None
    index: RetrievalIndex | None = None
    small_model: TargetModel | None = None
    runner: StepRunner = field(default_factory=EagerRunner)  # of the head's steps
    _heads: dict[tuple[TargetModel, HeadOptions], HeadDrafts] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def sources_for(self, target: TargetModel, method: Method) -> Sources:
        """Every draft source that can be had for a target, as a method runs it."""
        guessers: list[Guesser] = [
            PreviousAction(),
            Extrapolation(target.action_tokens),
            NgramLookup(),
            Recycled(),
        ]
        if self.index is not None:
            guessers.append(Retrieval(self.index))
        growers: list[Grower] = [TokenRecycling(target)]
        drawing = Drawing(method.sampling) if method.draws_drafts else None
        if self.head is not None:
            options = HeadOptions(self.rope_offset, self.key_mask, method.whole_vocabulary)
            if drawing is not None:
                growers.append(DrawnHeadDrafts(self.head, target, options, drawing))
            else:
                growers.append(self._head_drafts(self.head, target, options))
        if self.medusa is not None:
            growers.append(MedusaDrafts(self.medusa, target))
        if self.small_model is not None:
            small = SmallModelOptions(
                method.patch_share, method.multi_level, method.whole_vocabulary, drawing
            )
            growers.append(SmallModelDrafts(self.small_model, target, small))
        for one in entry_points(group=DRAFT_SOURCES):
            if method.uses(DraftKind(one.name)):
                made = _made_by(one, target)
                (growers if hasattr(made, "grow") else guessers).append(made)
        return Sources(tuple(guessers), tuple(growers))

    def _head_drafts(
        self, head: EagleHead, target: TargetModel, options: HeadOptions
    ) -> HeadDrafts:
        """One for all methods, so that they share its memory and what was captured."""
        key = (target, options)
        if key not in self._heads:
            self._heads.setdefault(key, HeadDrafts(head, target, options, self.runner))
        return self._heads[key]


def _made_by(found: EntryPoint, target: TargetModel) -> Any:
    """A source of an installed package: what its entry point names is called with the target."""
    made = found.load()(target)
    if getattr(made, "kind", None) != DraftKind(found.name):
        raise RequestError(
            "drafts", f"{found.value} must make a source whose kind is {found.name!r}, got {made!r}"
        )
    return made


class Decoder:
    """Decodes batches of actions by one method. One thread; keeps what its guard has measured."""

    def __init__(
        self,
        target: TargetModel,
        method: Method,
        sources: Sources,
        runner: StepRunner | None = None,
    ) -> None:
        """`runner` replays rounds that can be recorded."""
        self.target = target
        self.method = method
        self._runner: StepRunner = runner or EagerRunner()
        # A rule that makes the host wait, or that is no key, keeps its rounds from being recorded.
        is_key = isinstance(method.rule, Hashable)
        self._records = is_key and find_wait(method.rule) is None
        self._sources = sources
        self._plans = sources.usable(method.plans)
        self._guards: dict[int, Guard] = {}
        self._rule = str(method.rule) if any(plan.kinds for plan in method.plans) else ""
        self._late = method.loop is Loop.PUBLISHED

    def decode(
        self,
        prompts: Prompts,
        rows: Sequence[DecodeRow],
        clock: StageClock,
        wants_margins: bool = False,
    ) -> list[DecodeTrace]:
        """Decode one action for every prompt, in order, and append it to its row's history.

        All rows must have actions of one length. No two rows may share a history.
        """
        sessions = [row.history.passes_needed for row in rows]
        remembering = [row.history.passes_needed if row.history.own else None for row in rows]
        guard = self._guard(rows[0].space.length)
        if guard is not None:
            choice = guard.choose(sessions, may_try=None not in remembering)
        else:
            choice = Choice(self._plans[0].name, "")
        padded, every = self._padded(prompts, rows)
        traces, cost = self._carry_out(choice, padded, every, clock, wants_margins)
        traces = traces[: len(rows)]
        cost = replace(cost, num_passes=cost.num_passes[: len(rows)])
        for trace, row in zip(traces, rows, strict=True):
            row.history.append(trace.tokens, trace.predicted, self.method.rule.drift_leak)
        if guard is not None:
            guard.learn(choice, cost, remembering)
            self._learn_hypothetically(guard, choice, rows)
        return traces

    def capture(self, batches: Sequence[Prompts], space: ActionSpace) -> None:
        """Run every step of the plans it may choose, on batches that nobody waits for."""
        length = space.length + self.method.loop.num_behind
        plans = self._plans if self.method.is_guarded else self._plans[:1]
        for plan in plans:
            for grower in self._sources.growers_of(plan.rounds):
                grower.warm_up(plan.shape, length)
            for prompts in batches if plan.kinds else ():
                self._capture_rounds(plan, prompts, space)

    def _capture_rounds(self, plan: Plan, prompts: Prompts, space: ActionSpace) -> None:
        """Rounds of every depth, with all that can guess: what sessions remember decides that."""
        clock, known = StageClock(prompts.embeds.device), set()
        for num_steps in (0, 1, STEPS_KEPT):
            row = DecodeRow(_warm_history(space, num_steps), space)
            rounds, prompts = self._rounds(plan, prompts, [row] * len(prompts.lengths), False)
            if rounds.recipe in known:
                continue
            known.add(rounds.recipe)
            features = rounds.prefill(prompts, rounds.first_drafts(prompts), clock.lap)
            if rounds.begin(features):
                for fewest in range(rounds.length):
                    rounds.play(fewest, clock.lap)

    def warm_up(self, prompts: Prompts, spaces: Sequence[ActionSpace]) -> None:
        """Run every plan on a batch that nobody waits for, so that the guard knows their costs."""
        guard = self._guard(spaces[0].length)
        for plan in dict.fromkeys((*self._plans, PLAIN)):
            for _ in range(_WARM_UP_RUNS):
                rows = [DecodeRow(_warm_history(space, STEPS_KEPT), space) for space in spaces]
                clock = StageClock(prompts.embeds.device)
                choice = Choice(plan.name, "")
                _, cost = self._carry_out(choice, prompts, rows, clock, wants_margins=False)
                if guard is not None:
                    guard.learn_cost(plan.name, cost)

    def _carry_out(
        self,
        choice: Choice,
        prompts: Prompts,
        rows: Sequence[DecodeRow],
        clock: StageClock,
        wants_margins: bool,
    ) -> tuple[list[DecodeTrace], ActionCost]:
        """Decode by the chosen plan; without guesses, as lean as can be."""
        plan = self._plan(choice.plan)
        if not plan.kinds:
            draws = [row.history.num_draws for row in rows]
            chooser = self.method.sampling.chooser(draws, prompts.embeds.device)
            plainly = AutoregressiveDecoder(self.target, chooser, wants_margins)
            length = common_length([row.space for row in rows])
            traces = plainly.decode(prompts, length, clock)
            cost = cost_of_plain(traces)
        else:
            rounds, prompts = self._rounds(plan, prompts, rows, wants_margins)
            run = ActionRun(len(rows), rounds.length)
            run_actions(rounds, prompts, run, clock)
            traces, cost = run.read(clock), run.cost(clock)
        return [
            replace(
                _without(trace, self.method.loop.num_behind if plan.kinds else 0),
                method=self.method.name,
                rule=self._rule,
                guard=choice.reason,
                plan=plan.name,
            )
            for trace in traces
        ], cost

    def _padded(
        self, prompts: Prompts, rows: Sequence[DecodeRow]
    ) -> tuple[Prompts, Sequence[DecodeRow]]:
        """The batch with copies of its first row behind, up to the next captured batch size."""
        if not self._fits(prompts):
            return prompts, rows
        padded = _padded(prompts)
        return padded, [*rows, *[rows[0]] * (len(padded.lengths) - len(rows))]

    def _fits(self, prompts: Prompts) -> bool:
        reserve = self._runner.reserve
        return reserve is not None and reserve.holds(*prompts.embeds.shape[:2])

    def _rounds(
        self, plan: Plan, prompts: Prompts, rows: Sequence[DecodeRow], wants_margins: bool
    ) -> tuple[Rounds, Prompts]:
        """The passes of a batch, and its prompts with what will be read of them."""
        histories = [row.history for row in rows]
        device = prompts.embeds.device
        behind = self.method.loop.num_behind
        space = SpaceTensors.of([row.space.with_more(behind) for row in rows], device)
        steps = self._sources.steps_needed(plan)
        history = HistoryTensors.of(histories, space.length - behind, steps, device)
        history = history.with_more(behind)
        context = ActionContext(space, history.drift, history.num_steps)
        keep_hidden = self.method.rule.needs_patches or self._sources.needs_hidden(plan)
        prompts = replace(prompts, keep_hidden=keep_hidden)
        trims = device.type == "cpu" and self._runner.reserve is None
        seen = Seen(prompts, histories, history, self.target.widest_tree, trims)
        verifier = self.verifier_for(histories, space.length, device)
        settled = Settled.nothing(space.groups, wants_margins)
        progress = settled.progress(prompts.last_tokens, fewest=0)
        drafts = BatchDrafts.of(self._sources, plan, seen, progress)
        is_recorded = self._records and self._fits(prompts) and drafts.may_be_recorded
        runner = self._runner if is_recorded and not wants_margins else EagerRunner()
        first = Round(self.target, drafts, verifier, context)
        return Rounds(first, settled, runner), prompts

    def _guard(self, length: int) -> Guard | None:
        """The guard for actions of this length; None where there is nothing to choose."""
        if not self.method.is_guarded or self._plans == (PLAIN,):
            return None
        if length not in self._guards:
            names = [plan.name for plan in self._plans]
            self._guards[length] = Guard(names, PLAIN.name, length - 1)
        return self._guards[length]

    def _plan(self, name: str) -> Plan:
        return next((plan for plan in self._plans if plan.name == name), PLAIN)

    def _learn_hypothetically(
        self, guard: Guard, choice: Choice, rows: Sequence[DecodeRow]
    ) -> None:
        """Tell the guard what plans that only repeat the last action would have needed.

        With exact match that can be counted afterwards: one pass for every token that changed.
        """
        if not self.method.rule.is_exact:
            return
        for plan in self._plans:
            if plan.name != choice.plan and plan.kinds == {DraftKind.PREVIOUS}:
                for row in rows:
                    if len(row.history.own) > 1:
                        passes = num_changed(row.history.own[-2], row.history.own[-1])
                        guard.learn_passes(plan.name, passes, row.history.passes_needed)

    def verifier_for(
        self, histories: Sequence[ActionHistory], length: int, device: torch.device
    ) -> Verifier:
        """What judges a batch: greedy, or with noise of its own for every row."""
        method, vocabulary = self.method, self.target.vocabulary
        if method.sampling.temperature == 0.0:
            return Verifier(method.rule, method.tie_break, vocabulary.first, clamps_late=self._late)
        draws = [history.num_draws for history in histories]
        like = torch.empty(len(vocabulary), device=device)
        noise, coins = method.sampling.position_noise(draws, like, length)
        return SampledVerifier(
            rule=method.rule,
            tie_break=method.tie_break,
            first_token=vocabulary.first,
            temperature=method.sampling.temperature,
            noise=noise,
            coins=coins,
            clamps_late=self._late,
        )


def _padded(prompts: Prompts) -> Prompts:
    of_draft = prompts.for_draft
    padded = with_leaves(prompts, tuple(pad_batch(one) for one in leaves(prompts)))
    return replace(padded, for_draft=of_draft and (lambda: _padded(of_draft())))


def _without(trace: DecodeTrace, num_behind: int) -> DecodeTrace:
    """The trace of the action alone, where a loop has decoded tokens behind it."""
    if num_behind == 0:
        return trace
    return replace(
        trace,
        tokens=trace.tokens[:-num_behind],
        predicted=trace.predicted[:-num_behind],
        margins=trace.margins[:-num_behind],
    )


def build_decoder(
    target: TargetModel, method: Method, models: DraftModels | None = None
) -> Decoder:
    """Join a target, a method and the draft sources there are.

    Raises `RequestError` when the method cannot do without a source that is missing.
    """
    sources = (models or DraftModels()).sources_for(target, method)
    missing = method.required - sources.kinds
    if missing:
        names = ", ".join(sorted(kind.value for kind in missing))
        raise RequestError(
            "decoding",
            f"{method.name!r} needs draft sources that were not loaded: {names}; load a draft head "
            "(--draft-head DIR), a draft model (--draft-model DIR) or whatever they need, or "
            "choose another method",
        )
    return Decoder(target, method, sources, None if models is None else models.runner)


def num_changed(before: Sequence[int], after: Sequence[int]) -> int:
    """Tokens that differ, the last one left out: it needs no pass of its own."""
    return sum(old != new for old, new in zip(before[:-1], after[:-1], strict=True))


def _warm_history(space: ActionSpace, num_steps: int) -> ActionHistory:
    """A session that has acted before, so that guesses from memory have their usual width."""
    history = ActionHistory()
    for _ in range(num_steps):
        history.append((0,) * space.length, (0,) * space.length, leak=1.0)
    return history
