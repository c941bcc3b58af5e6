"""The engine: answers of any length, decoded together in as few target passes as it takes.

`start` hands answers in, `step` plays one round of every batch and returns what has ended, `cancel`
lets go of one between two rounds; what a round is, `Lane` says. Plain decoding is the same loop
with trees that are only a root.

Here it is decided what is decoded where: the plan of a method, by its guard, and the lane.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint

from deft_policies.decoding import kinds
from deft_policies.decoding.batch import Batch, Form, Row
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.drafts.base import DraftSource
from deft_policies.decoding.drafts.eagle import EagleDrafts
from deft_policies.decoding.drafts.medusa import MedusaDrafts
from deft_policies.decoding.drafts.plugin import PluginSource
from deft_policies.decoding.drafts.previous_answer import PreviousAnswer
from deft_policies.decoding.drafts.recycling import TokenRecycling
from deft_policies.decoding.drafts.retrieval import Retrieval, RetrievalIndex
from deft_policies.decoding.drafts.session import (
    Extrapolation,
    JacobiDrafts,
    NgramLookup,
    PreviousAction,
)
from deft_policies.decoding.drafts.small_model import SmallModelDrafts
from deft_policies.decoding.guard import Choice, Guard
from deft_policies.decoding.lane import Group, Lane, Maker, take
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import OUR_PLANS, PLAIN, KeyMask, Loop, Plan, RopeOffset
from deft_policies.decoding.plugins import find_plugins
from deft_policies.decoding.target import Prompts, Target
from deft_policies.errors import NotFiniteError, RequestError
from deft_policies.memory import STEPS_KEPT, SessionMemory
from deft_policies.model.draft_heads import EagleHead, MedusaHeads

WIDEST = 64  # nodes of a tree
_ROWS = 8  # that a lane has room for, at least
_WARM_UP_RUNS = 3
_GUARDS_KEPT = 128
_TRIED = 8  # tokens of a text that nobody waits for
# What drafts text where a method leaves it to us: actions of the past say nothing of it.
_TEXT = Plan("previous-answer", (kinds.PREVIOUS_ANSWER,), (kinds.PREVIOUS_ANSWER,))


@dataclass(frozen=True)
class DraftModels:
    """What drafts with weights or data of its own; None for what is not there."""

    head: EagleHead | None = None
    rope_offset: RopeOffset = RopeOffset.CORRECT
    key_mask: KeyMask = KeyMask.CAUSAL
    medusa: MedusaHeads | None = None
    index: RetrievalIndex | None = None
    small_model: Target | None = None

    def makers(self, target: Target) -> dict[str, Maker]:
        """What makes a source for one batch, as a method runs it, of every kind that can be had."""
        makers: dict[str, Maker] = {
            kinds.PREVIOUS: lambda method: PreviousAction(),
            kinds.EXTRAPOLATION: lambda method: Extrapolation(target.action_tokens),
            kinds.NGRAM: lambda method: NgramLookup(),
            kinds.RECYCLED: lambda method: JacobiDrafts(),
            kinds.PREVIOUS_ANSWER: lambda method: PreviousAnswer(),
            kinds.TOKEN_RECYCLING: lambda method: TokenRecycling(target),
        }
        if (index := self.index) is not None:
            makers[kinds.RETRIEVAL] = lambda method: Retrieval(index)
        if (heads := self.medusa) is not None:
            makers[kinds.MEDUSA] = lambda method: MedusaDrafts(heads, target)
        if (head := self.head) is not None:
            makers[kinds.HEAD] = lambda method: EagleDrafts(
                head, target, method, self.rope_offset, self.key_mask
            )
        if (model := self.small_model) is not None:
            makers[kinds.SMALL_MODEL] = partial(SmallModelDrafts, model, target)
        return makers


def _plugin_source(found: EntryPoint, target: Target, method: Method) -> DraftSource:
    return PluginSource(found, target)


class Engine:
    """Decodes answers by any methods over one target. Used by one thread."""

    def __init__(
        self, target: Target, models: DraftModels | None = None, widest: int = WIDEST
    ) -> None:
        self.target = target
        self._widest = widest
        self._makers = (models or DraftModels()).makers(target)
        self._untried = dict(find_plugins(kinds.SOURCES))
        for name, found in self._untried.items():
            self._makers[name] = partial(_plugin_source, found, target)
        self._lanes: list[Lane] = []
        # By a method's text, its rule and an action's tokens (0: a text); the last used comes last.
        self._guards: dict[tuple[str, str, int], Guard] = {}

    def start(self, prompts: Prompts, rows: Sequence[Row]) -> None:
        """Take in answers, a row of `prompts` each; `RequestError` for what cannot be done.

        Where one cannot begin none does. Those of one method and length begin together, by one
        plan. No two rows may share a memory.
        """
        groups: dict[tuple[str, str, int, bool], list[int]] = {}
        for index, row in enumerate(rows):
            self.check(row)
            method, form = row.method, row.form
            key = (method.name, str(method.rule), form.max_tokens, form.is_action)
            groups.setdefault(key, []).append(index)
        try:
            for members in groups.values():
                self._begin(take(prompts, members), [rows[index] for index in members])
        except BaseException:
            for row in rows:
                self.cancel(row)
            raise

    def step(self, clock: StageClock, first: Collection[Row] = ()) -> list[Row]:
        """Play one round of every answer; those that have ended, with trace and memory.

        Where `first` names some, batches that hold none of them sit this round out. An answer that
        is not `is_finite` means nothing.
        """
        lanes = [lane for lane in self._lanes if lane.rows]
        hurried = [lane for lane in lanes if any(row in first for row in lane.rows)]
        return [row for lane in hurried or lanes for row in lane.step(clock)]

    def cancel(self, row: Row) -> None:
        """Let go of an answer between two rounds; nothing where it has ended."""
        any(lane.cancel(row) for lane in self._lanes)

    def decode(self, prompts: Prompts, rows: Sequence[Row], clock: StageClock) -> None:
        """Decode answers to their end; `NotFiniteError` if the model's numbers mean nothing."""
        self.start(prompts, rows)
        self._play(rows, clock)
        num_broken = sum(not row.is_finite for row in rows)
        if num_broken:
            raise NotFiniteError(
                f"the model's logits hold NaN or infinity in {num_broken} of {len(rows)} answers; "
                "its weights or its number format are broken, nothing was answered"
            )

    def _play(self, rows: Sequence[Row], clock: StageClock) -> None:
        left = {id(row) for row in rows}
        try:
            while left:
                left -= {id(row) for row in self.step(clock)}
        except BaseException:
            for row in rows:
                self.cancel(row)
            raise

    def warm_up(self, prompts: Prompts, method: Method, form: Form) -> None:
        """Run every plan of a method on a batch that nobody waits for: the guard learns costs."""
        if form.stop is not None:
            self.target.measure_width(prompts, self._widest)
        plans = dict.fromkeys((*self._plans_for(method, form), PLAIN))
        if not form.is_action:
            form = replace(form, max_tokens=min(_TRIED, form.max_tokens))
        for plan in plans:
            for _ in range(_WARM_UP_RUNS):
                rows = [_blank_row(method, form, STEPS_KEPT) for _ in prompts.lengths]
                self._begin(prompts, rows, plan)
                self._play(rows, StageClock(self.target.device))

    def capture(self, method: Method, batches: Sequence[Prompts], form: Form) -> None:
        """Record all that a method may need for answers like these, where steps are recorded.

        `batches` are of each size that is recorded. What is recorded runs several times: nobody may
        wait for any answer meanwhile.
        """
        plans = self._plans_for(method, form)
        for plan in dict.fromkeys((*plans, PLAIN)) if method.is_guarded else plans[:1]:
            drafts = [self._makers[kind](method) for kind in plan.rounds]
            for num_steps in sorted({0, *(one.least_steps for one in drafts)}):
                for prompts in batches:
                    self._record(prompts, method, form, plan, num_steps)

    def _record(
        self, prompts: Prompts, method: Method, form: Form, plan: Plan, num_steps: int
    ) -> None:
        rows = [_blank_row(method, form, num_steps) for _ in prompts.lengths]
        method = self._prepare(rows, plan)
        lane = next((one for one in self._lanes if one.is_fixed and one.fits(prompts, rows)), None)
        reserve = self.target.runner.reserve
        if lane is None and reserve is not None:
            lane = self._new_lane(reserve.batches[0], rows, reserve.padded(reserve.longest))
        if lane is not None:
            lane.record(Group(rows, prompts, Choice(plan.name, ""), None), method, plan)

    def plans(self, method: Method) -> tuple[Plan, ...]:
        """Those of a method's plans whose sources are there; plain decoding if none.

        Raises `RequestError` when the method cannot do without a source that is missing.
        """
        for kind in method.required & self._untried.keys():  # a broken plugin is refused by name
            self._makers[kind](method)
            self._untried.pop(kind, None)
        missing = method.required - self._makers.keys()
        if missing:
            names = ", ".join(sorted(missing))
            raise RequestError(
                "decoding",
                f"{method.name!r} needs draft sources that were not loaded: {names}; load a draft "
                "head (--draft-head DIR), a draft model (--draft-model DIR) or whatever they need, "
                "or choose another method",
            )
        return tuple(plan for plan in method.plans if plan.kinds <= self._makers.keys()) or (PLAIN,)

    def check(self, row: Row) -> None:
        """Raise `RequestError` for an answer that cannot be decoded as it is asked for."""
        self.plans(row.method)
        if row.form.space is None and row.method.rule.needs_space:
            raise RequestError(
                "decoding",
                f"{row.method.name!r} measures distances between action tokens, and this model's "
                "answers have none; exact, entropy, top-k and near-top rules apply",
            )

    def _plans_for(self, method: Method, form: Form) -> tuple[Plan, ...]:
        """Where a method leaves it to us, text is drafted in other ways than actions."""
        plans = self.plans(method)
        return (_TEXT,) if not form.is_action and method.plans == OUR_PLANS else plans

    def _begin(self, prompts: Prompts, rows: list[Row], tried: Plan | None = None) -> None:
        """By the plan that is tried, if one is given: the guard learns its cost, and no more."""
        method, form = rows[0].method, rows[0].form
        plans = self._plans_for(method, form)
        guard = self._guard(method, plans, form)
        plan = tried or plans[0]
        choice = Choice(plan.name, "")
        if guard is not None and tried is None:
            for row in rows:
                row.remembers = bool(row.memory.own if form.is_action else row.memory.answer)
            choice = _choose(guard, rows)
            plan = next((one for one in plans if one.name == choice.plan), PLAIN)
        method = self._prepare(rows, plan, choice.reason)
        self._lane(prompts, rows, method, plan).join(Group(rows, prompts, choice, guard))

    def _prepare(self, rows: Sequence[Row], plan: Plan, reason: str = "") -> Method:
        """Tell rows by which plan they are decoded; the method, as this plan plays it."""
        method = rows[0].method
        if not plan.kinds and method.loop is not Loop.LEAN:  # plain decoding is one loop only
            method = replace(method, loop=Loop.LEAN)
        for row in rows:
            row.plan, row.reason = plan.name, reason
            behind = method.loop.num_behind if row.form.is_action else 0
            row.limit = row.form.max_tokens + behind
        return method

    def _lane(self, prompts: Prompts, rows: Sequence[Row], method: Method, plan: Plan) -> Lane:
        """One that plays this method and plan and has room, else one where nobody is."""
        able = [lane for lane in self._lanes if lane.fits(prompts, rows)]
        for lane in able:
            if lane.rows and lane.plan == plan and lane.method == method:
                return lane
        found = next((lane for lane in able if not lane.rows), None)
        # What nobody uses is not kept: callers name the methods.
        self._lanes = [one for one in self._lanes if one.rows or one.is_fixed or one is found]
        if found is None:
            found = self._new_lane(max(_ROWS, 1 << (len(rows) - 1).bit_length()), rows)
        found.switch_to(method, plan)
        return found

    def _new_lane(self, num_rows: int, rows: Sequence[Row], longest: int = 0) -> Lane:
        """Room for so many answers like these, and for what a loop may look at behind them."""
        positions = 1 + max(row.form.max_tokens for row in rows)
        places = 1 + max(row.form.num_places for row in rows)
        batch = Batch(self.target.device, num_rows, positions, places, longest)
        # What actions are drafted by makes no wider trees.
        of_actions = all(row.form.is_action for row in rows)
        widest = min(self._widest, WIDEST) if of_actions else self._widest
        lane = Lane(self.target, self._makers, widest, batch)
        self._lanes.append(lane)
        return lane

    def _guard(self, method: Method, plans: Sequence[Plan], form: Form) -> Guard | None:
        """The guard for answers like these; None where there is nothing to choose."""
        if not method.is_guarded or tuple(plans) == (PLAIN,):
            return None
        length = form.max_tokens if form.is_action else 0
        key = method.name, str(method.rule), length
        guard = self._guards.pop(key, None) or Guard([plan.name for plan in plans], PLAIN.name)
        self._guards[key] = guard
        if len(self._guards) > _GUARDS_KEPT:
            # Methods that callers make up push out no method that has a name of its own.
            made_up = [key for key in self._guards if ":" in key[0]]
            del self._guards[made_up[0] if made_up else next(iter(self._guards))]
        return guard


def _choose(guard: Guard, rows: Sequence[Row]) -> Choice:
    """By the guard, which takes texts to be as long as the last ones.

    The first text of a session has nothing to draft from, so it is decoded plainly.
    """
    if rows[0].form.is_action:
        length = rows[0].form.max_tokens
    elif any(row.remembers for row in rows):
        length = max(len(row.memory.answer) for row in rows)
    else:
        return Choice(PLAIN.name, "no text to draft from yet")
    sessions = [row.memory.passes_needed for row in rows]
    return guard.choose(sessions, length, may_try=all(row.remembers for row in rows))


def _blank_row(method: Method, form: Form, num_steps: int) -> Row:
    """As of a session that has acted so many times, always alike."""
    own = ((0,) * form.num_places,) * num_steps
    return Row(method, form, SessionMemory(own=own, answer=(0,) * _TRIED * bool(num_steps)))
