"""The way in: build a decoder for a target model and a preset, and decode batches of actions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from deft_client.types import DecodeTrace
from deft_policies.decoding.acceptance.sampled import RatioVerifier, position_noise
from deft_policies.decoding.acceptance.scored import ActionContext
from deft_policies.decoding.acceptance.verify import Verifier
from deft_policies.decoding.action_space import ActionSpace, SpaceTensors, common_length
from deft_policies.decoding.autoregressive import AutoregressiveDecoder
from deft_policies.decoding.drafts.combine import PlannedDrafting, Seen, Sources
from deft_policies.decoding.drafts.eagle import EagleHead
from deft_policies.decoding.drafts.head import DrawnHeadDrafts, HeadDrafts, HeadOptions
from deft_policies.decoding.drafts.medusa import MedusaDrafts, MedusaHeads
from deft_policies.decoding.drafts.memory import (
    Extrapolation,
    NgramLookup,
    PreviousAction,
    Recycled,
)
from deft_policies.decoding.drafts.retrieval import Retrieval, RetrievalIndex
from deft_policies.decoding.drafts.small_model import SmallModelDrafts
from deft_policies.decoding.drafts.source import Grower, Guesser
from deft_policies.decoding.guard import ActionCost, Choice, Guard
from deft_policies.decoding.history import STEPS_KEPT, ActionHistory, HistoryTensors
from deft_policies.decoding.plan import PLAIN, DraftKind, KeyMask, Plan, RopeOffset
from deft_policies.decoding.presets import Preset
from deft_policies.decoding.records import ActionRun, cost_of_plain
from deft_policies.decoding.speculative import RunState, run_actions
from deft_policies.decoding.target import Prompts, TargetModel
from deft_policies.decoding.trace import StageClock
from deft_policies.errors import RequestError
from deft_policies.model.layout import EagerRunner, StepRunner

_WARM_UP_RUNS = 3


@dataclass(frozen=True)
class DecodeRow:
    """One action to decode: the session it belongs to and the space it lives in."""

    history: ActionHistory
    space: ActionSpace


@dataclass(frozen=True)
class _Found:
    """A decoded batch."""

    traces: list[DecodeTrace]
    cost: ActionCost


@dataclass(frozen=True)
class DraftModels:
    """What drafts with weights or data of its own; None for what is not there."""

    head: EagleHead | None = None
    rope_offset: RopeOffset = RopeOffset.CORRECT
    key_mask: KeyMask = KeyMask.CAUSAL
    medusa: MedusaHeads | None = None
    index: RetrievalIndex | None = None
    small_model: TargetModel | None = None
    patch_share: float = 1.0  # of the image patches that the small model looks at
    new_runner: Callable[[], StepRunner] = EagerRunner  # runs the head's steps of fixed shape


class Decoder:
    """Decodes batches of actions by one method. One thread; keeps what its guard has measured."""

    def __init__(self, target: TargetModel, preset: Preset, sources: Sources) -> None:
        self.target = target
        self.preset = preset
        self._sources = sources
        self._plans = sources.usable(preset)
        self._guards: dict[int, Guard] = {}

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
        sessions = [row.history.acceptance for row in rows]
        remembering = [row.history.acceptance if row.history.own else None for row in rows]
        guard = self._guard(rows[0].space.length)
        if guard is not None:
            choice = guard.choose(sessions, may_try=None not in remembering)
        else:
            choice = Choice(self._plans[0].name, "")
        found = self._carry_out(choice, prompts, rows, clock, wants_margins)
        for trace, row in zip(found.traces, rows, strict=True):
            row.history.append(trace.tokens, trace.predicted, self.preset.rule.drift_leak)
        if guard is not None:
            guard.learn(choice, found.cost, remembering)
            self._learn_hypothetically(guard, choice, rows)
        return found.traces

    def warm_up(self, prompts: Prompts, spaces: Sequence[ActionSpace]) -> None:
        """Run every plan on a batch that nobody waits for, so that the guard knows their costs."""
        guard = self._guard(spaces[0].length)
        for plan in (*self._plans, PLAIN):
            for _ in range(_WARM_UP_RUNS):
                rows = [DecodeRow(_warm_history(space), space) for space in spaces]
                clock = StageClock(prompts.embeds.device)
                choice = Choice(plan.name, "")
                found = self._carry_out(choice, prompts, rows, clock, wants_margins=False)
                if guard is not None:
                    guard.learn_cost(plan.name, found.cost)

    def _carry_out(
        self,
        choice: Choice,
        prompts: Prompts,
        rows: Sequence[DecodeRow],
        clock: StageClock,
        wants_margins: bool,
    ) -> _Found:
        """Decode by the chosen plan; without guesses, as lean as plain decoding itself."""
        plan = self._plan(choice.plan)
        if plan == PLAIN and self.preset.sampling.temperature == 0.0:
            plainly = AutoregressiveDecoder(self.target, wants_margins=wants_margins)
            length = common_length([row.space for row in rows])
            traces = plainly.decode(prompts, length, clock)
            cost = cost_of_plain(traces)
        else:
            run = self._run(plan, prompts, rows, clock, wants_margins)
            traces, cost = run.read(clock), run.cost(clock)
        name, rule = self.preset.name, str(self.preset.rule)
        told = [replace(one, method=name, rule=rule, guard=choice.reason) for one in traces]
        return _Found(told, cost)

    def _run(
        self,
        plan: Plan,
        prompts: Prompts,
        rows: Sequence[DecodeRow],
        clock: StageClock,
        wants_margins: bool,
    ) -> ActionRun:
        histories = [row.history for row in rows]
        device = prompts.embeds.device
        space = SpaceTensors.of([row.space for row in rows], device)
        steps = self._sources.steps_needed(plan)
        history = HistoryTensors.of(histories, space.length, steps, device)
        context = ActionContext(space, history.drift, history.num_steps)
        keep_hidden = self.preset.rule.needs_patches or self._sources.needs_hidden(plan)
        prompts = replace(prompts, keep_hidden=keep_hidden)
        seen = Seen(prompts, histories, history, self.target.widest_tree)
        verifier = self.verifier_for(histories, space.length, device)
        state = RunState(self.target, verifier, context, wants_margins)
        return run_actions(state, prompts, PlannedDrafting(self._sources, plan, seen), clock)

    def _guard(self, length: int) -> Guard | None:
        """The guard for actions of this length; None where there is nothing to choose."""
        if not self.preset.is_guarded or self._plans == (PLAIN,):
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
        if not self.preset.rule.is_exact:
            return
        for plan in self._plans:
            if plan.name != choice.plan and plan.kinds == {DraftKind.PREVIOUS}:
                for row in rows:
                    if len(row.history.own) > 1:
                        passes = num_changed(row.history.own[-2], row.history.own[-1])
                        guard.learn_passes(plan.name, passes, row.history.acceptance)

    def verifier_for(
        self, histories: Sequence[ActionHistory], length: int, device: torch.device
    ) -> Verifier:
        """What judges a batch: greedy, or with noise of its own for every row."""
        preset, vocabulary = self.preset, self.target.vocabulary
        greedy = Verifier(preset.rule, preset.tie_break, vocabulary.first)
        if preset.sampling.temperature == 0.0:
            return greedy
        draws = [history.num_draws for history in histories]
        like = torch.empty(len(vocabulary), device=device)
        noise, coins = position_noise(preset.sampling, draws, like, length)
        return RatioVerifier(
            rule=greedy.rule,
            tie_break=greedy.tie_break,
            first_token=greedy.first_token,
            temperature=preset.sampling.temperature,
            noise=noise,
            uniform=coins,
        )


def build_decoder(
    target: TargetModel,
    preset: Preset,
    models: DraftModels | None = None,
) -> Decoder:
    """Join a target, a method and the draft sources there are.

    Raises `RequestError` when the preset cannot do without a source that is missing.
    """
    sources = build_sources(target, preset, models or DraftModels())
    missing = preset.required - sources.kinds
    if missing:
        names = ", ".join(sorted(kind.value for kind in missing))
        raise RequestError(
            "decoding",
            f"{preset.name!r} needs draft sources that were not loaded: {names}; load a draft head "
            "(--draft-head DIR) or whatever they need, or choose another method",
        )
    return Decoder(target, preset, sources)


def build_sources(target: TargetModel, preset: Preset, models: DraftModels) -> Sources:
    """Collect every draft source that can be built."""
    guessers: list[Guesser] = [
        PreviousAction(),
        Extrapolation(target.action_tokens),
        NgramLookup(),
        Recycled(),
    ]
    if models.index is not None:
        guessers.append(Retrieval(models.index))
    growers: list[Grower] = []
    if models.head is not None:
        options = HeadOptions(models.rope_offset, models.key_mask, preset.whole_vocabulary)
        if preset.draws_drafts:
            growers.append(DrawnHeadDrafts(models.head, target, options, preset.sampling))
        else:
            growers.append(HeadDrafts(models.head, target, options, models.new_runner()))
    if models.medusa is not None:
        growers.append(MedusaDrafts(models.medusa, target))
    if models.small_model is not None:
        growers.append(SmallModelDrafts(models.small_model, models.patch_share))
    return Sources(tuple(guessers), tuple(growers))


def num_changed(before: Sequence[int], after: Sequence[int]) -> int:
    """Tokens that differ, the last one left out: it needs no pass of its own."""
    return sum(old != new for old, new in zip(before[:-1], after[:-1], strict=True))


def _warm_history(space: ActionSpace) -> ActionHistory:
    """A session that has acted before, so that guesses from memory have their usual width."""
    history = ActionHistory()
    for _ in range(STEPS_KEPT):
        history.append((0,) * space.length, (0,) * space.length, leak=1.0)
    return history
