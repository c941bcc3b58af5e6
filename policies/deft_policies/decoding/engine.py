"""The engine: answers of any length, decoded together in as few target passes as it takes.

`start` hands answers in, `step` plays one round of every batch and returns what has ended, `cancel`
lets go of one between two rounds; `Round` is a round. Plain decoding is the same loop with trees
that are only a root.

Here it is decided who decodes with whom: by which plan of its method, as its guard chooses, and in
which batch.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint

import torch

from deft_policies.decoding import kinds
from deft_policies.decoding.batch import AnswerSpec, Batch, Row
from deft_policies.decoding.clock import Stage, StageClock
from deft_policies.decoding.drafts import DraftSource, PluginSource, heads, session
from deft_policies.decoding.drafts.numbers import PreviousNumbers
from deft_policies.decoding.drafts.previous_answer import PreviousAnswer
from deft_policies.decoding.drafts.retrieval import Retrieval, RetrievalIndex
from deft_policies.decoding.drafts.small_model import SmallModelDrafts
from deft_policies.decoding.guard import Choice, Guard
from deft_policies.decoding.methods import AUTOREGRESSIVE, Method
from deft_policies.decoding.plan import OUR_PLANS, PLAIN, KeyMask, Plan, RopeOffset
from deft_policies.decoding.plugins import find_plugins
from deft_policies.decoding.steps import BatchSteps, Maker
from deft_policies.decoding.target import Prompts, Target, bucket
from deft_policies.errors import NotFiniteError, RequestError
from deft_policies.memory import STEPS_KEPT, SessionMemory
from deft_policies.model.draft_heads import EagleHead, MedusaHeads
from deft_policies.model.kv_cache import STRIP

WIDEST = 64  # nodes of a tree
_MOST_ROWS = 8  # that a batch is made for, unless more begin at once
_WARM_UP_RUNS = 3
_WARM_UP_TOKENS = 8  # of a text
_GUARDS_KEPT = 128
# Tokens between two edits of an old answer: a pass with the widest drafts of the golden sessions
# writes 8 of a text, and one of a taught policy that writes numbers 5 or 6.
_EDITS_APART, _NUMBERS_APART = 7, 4
# What drafts text where a method leaves it to us: actions of the past say nothing of it.
_TEXT = Plan("previous-answer", (kinds.PREVIOUS_ANSWER,), (kinds.PREVIOUS_ANSWER,))
_NUMBERS = Plan("previous-numbers", (kinds.PREVIOUS_NUMBERS,), (kinds.PREVIOUS_NUMBERS,))


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
            kinds.PREVIOUS: lambda method: session.PreviousAction(),
            kinds.EXTRAPOLATION: lambda method: session.Extrapolation(target.action_tokens),
            kinds.NGRAM: lambda method: session.NgramLookup(),
            kinds.RECYCLED: lambda method: session.JacobiDrafts(),
            kinds.PREVIOUS_ANSWER: lambda method: PreviousAnswer(target),
            kinds.PREVIOUS_NUMBERS: lambda method: PreviousNumbers(target),
            kinds.TOKEN_RECYCLING: lambda method: session.TokenRecycling(target),
        }
        if (index := self.index) is not None:
            makers[kinds.RETRIEVAL] = lambda method: Retrieval(index)
        if (medusa := self.medusa) is not None:
            makers[kinds.MEDUSA] = lambda method: heads.MedusaDrafts(medusa, target)
        if (head := self.head) is not None:
            makers[kinds.HEAD] = lambda method: heads.EagleDrafts(
                head, target, method, self.rope_offset, self.key_mask
            )
        if (model := self.small_model) is not None:
            makers[kinds.SMALL_MODEL] = partial(SmallModelDrafts, model, target)
        return makers


class Engine:
    """Decodes answers by any methods over one target. Used by one thread."""

    def __init__(
        self, target: Target, models: DraftModels | None = None, widest: int = WIDEST
    ) -> None:
        self.target = target
        self._widest = widest
        self._makers = (models or DraftModels()).makers(target)
        # Sources of packages by name, once they are made, and why others could not be made.
        self._plugins: dict[str, PluginSource] = {}
        self._broken: dict[str, str] = {}
        for name, found in find_plugins(kinds.SOURCES).items():
            self._makers[name] = partial(self._plugin_source, found)
        self._rounds: dict[Batch, BatchSteps] = {}  # what each batch plays
        self._captured: list[BatchSteps] = []
        # By a method's text, its rule and an action's tokens (0: a text); the last used comes last.
        self._guards: dict[tuple[str, str, int], Guard] = {}

    @property
    def rows(self) -> list[Row]:
        """The answers that are on their way."""
        return [row for one in self._rounds for row in one.running]

    @property
    def _playing(self) -> list[BatchSteps]:
        return [one for one in self._rounds.values() if one.batch.running]

    def start(self, prompts: Prompts, rows: Sequence[Row]) -> None:
        """Take in answers, a row of `prompts` each; `RequestError` for what cannot be done.

        Where one cannot begin none does. Those of one method and length begin together, by one
        plan. No two rows may share a memory.
        """
        groups: list[list[int]] = []
        for index, row in enumerate(rows):
            self.check(row)
            alike = [one for one in groups if _is_alike(rows[one[0]], row)]
            if alike:
                alike[0].append(index)
            else:
                groups.append([index])
        try:
            for members in groups:
                self._begin(prompts.take(members), [rows[index] for index in members])
        except BaseException:
            for row in rows:
                self.cancel(row)
            raise

    def step(self, clock: StageClock, first: Collection[Row] = ()) -> list[Row]:
        """Play one round of every answer; those that have ended, with trace and memory.

        Where `first` names some, batches that hold none of them sit this round out. An answer that
        is not `is_finite` means nothing.
        """
        playing = self._playing
        hurried = [one for one in playing if any(row in first for row in one.batch.running)]
        return [self._finish(row, one) for one in hurried or playing for row in one.step(clock)]

    def cancel(self, row: Row) -> None:
        """Let go of an answer between two rounds; nothing where it has ended."""
        for one in self._playing:
            if row in one.batch.rows:
                row.is_done = True
                row.beside.remove(row)
                one.let_go(row)

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

    def _finish(self, row: Row, played: BatchSteps) -> Row:
        """Let go of an answer that has ended, with trace and memory; its guard learns from it.

        One that is not finite has neither, and nobody learns from it.
        """
        if not row.is_finite:
            played.let_go(row)
            return row
        num_tokens = min(len(row.tokens), row.spec.max_tokens)
        margins: list[float] = []
        if row.wants_margins:
            margins = played.batch.margins[row.slot, :num_tokens].tolist()
        if row.wants_log_probs:
            row.log_probs = tuple(played.batch.log_probs[row.slot, :num_tokens].tolist())
        row.finish(margins)
        played.let_go(row)
        if row.guard is not None:
            _learn_passes(row.guard, row)
            if row.beside and all(one.is_done for one in row.beside):
                # The longest was there all the time.
                records = max((one.records for one in row.beside), key=len)
                passes = [(one.num_nodes, one.ms(*Stage)) for one in records]
                row.guard.learn(row.choice, len(row.beside), passes)
                row.beside.clear()
        return row

    def warm_up(self, prompts: Prompts, method: Method, spec: AnswerSpec) -> None:
        """Run every plan of a method on a batch that nobody waits for: the guard learns costs.

        In turn, so that other work on the machine slows all of them down alike.
        """
        if spec.stop is not None:
            apart = _NUMBERS_APART if spec.numbers_in_row else _EDITS_APART
            self.target.measure_width(prompts, self._widest, apart)
        plans = dict.fromkeys((*self._plans_for(method, spec), PLAIN))
        if not spec.is_action:
            spec = replace(spec, max_tokens=min(_WARM_UP_TOKENS, spec.max_tokens))
        for _ in range(_WARM_UP_RUNS):
            for plan in plans:
                rows = [_blank_row(method, spec, STEPS_KEPT) for _ in prompts.lengths]
                self._begin(prompts, rows, plan)
                self._play(rows, StageClock(self.target.device))

    def capture(self, method: Method, batches: Sequence[Prompts], spec: AnswerSpec) -> None:
        """Capture all rounds that a method may need for answers like these.

        `batches` are of each size that is captured. What is captured runs several times: nobody may
        wait for any answer meanwhile.
        """
        plans = self._plans_for(method, spec)
        for plan in dict.fromkeys((*plans, PLAIN)) if method.is_guarded else plans[:1]:
            drafts = [self._makers[kind](method) for kind in plan.rounds]
            for num_steps in sorted({0, *(one.least_steps for one in drafts)}):
                for prompts in batches:
                    rows = [_blank_row(method, spec, num_steps) for _ in prompts.lengths]
                    self._capture(prompts, rows, plan)

    def _capture(self, prompts: Prompts, rows: list[Row], plan: Plan) -> None:
        method = self._prepare(rows, Choice(plan.name, ""), plan)
        reserve = self.target.runner.reserve
        if reserve is None:
            return
        made = [one for one in self._rounds if one.longest]
        batch = next((one for one in made if self._fits(one, prompts, rows)), None)
        if batch is None:
            longest = reserve.padded(reserve.longest)
            batch = self._new_batch(reserve.batches[0], prompts, rows, longest)
        played = self._switch(batch, method, plan)
        played.capture(rows, prompts)
        if played not in self._captured:
            self._captured.append(played)

    def _plugin_source(self, found: EntryPoint, method: Method) -> DraftSource:
        """A package's source for one batch. It is made on the first call, and never again."""
        if found.name not in self._plugins:
            try:
                with torch.inference_mode():
                    self._plugins[found.name] = PluginSource(found, self.target)
            except RequestError as error:
                self._broken[found.name] = str(error)
                raise
        return self._plugins[found.name].for_a_batch()

    def plans(self, method: Method) -> tuple[Plan, ...]:
        """Those of a method's plans whose sources are there; plain decoding if none.

        Raises `RequestError` when the method cannot do without a source that is missing. Looks at
        names alone: may run on any thread.
        """
        for kind in method.required & self._broken.keys():
            raise RequestError("drafts", self._broken[kind])
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
        """Raise `RequestError` for an answer that cannot be decoded as it is asked for.

        May run on any thread. What a package's source is good for shows when it is first used.
        """
        self.plans(row.method)
        rule, numbers = row.method.rule, row.spec.numbers_in_row
        if rule.reads_numbers and not numbers:
            raise RequestError(
                "decoding",
                f"{row.method.name!r} judges numbers that are written as text, and this model "
                "writes none; 'deft' is for action tokens",
            )
        if rule.needs_space and (row.spec.space is None or numbers):
            raise RequestError(
                "decoding",
                f"{row.method.name!r} measures distances between action tokens, and this model's "
                "answers have none; exact, entropy, top-k and near-top rules apply",
            )

    def _plans_for(self, method: Method, spec: AnswerSpec) -> tuple[Plan, ...]:
        """Where a method leaves it to us, text is drafted in other ways than actions."""
        plans = self.plans(method)
        if spec.is_action or method.plans != OUR_PLANS:
            return plans
        return (_NUMBERS,) if spec.numbers_in_row else (_TEXT,)

    def _begin(self, prompts: Prompts, rows: list[Row], tried: Plan | None = None) -> None:
        """By the plan that is tried, if one is given: the guard learns its cost, and no more."""
        method, spec = rows[0].method, rows[0].spec
        plans = self._plans_for(method, spec)
        guard = self._guard(method, plans, spec)
        plan = tried or plans[0]
        choice = Choice(plan.name, "")
        if guard is not None and tried is None:
            for row in rows:
                row.has_history = bool(row.memory.own if spec.is_action else row.memory.answer)
            choice = _choose(guard, rows)
            plan = next((one for one in plans if one.name == choice.plan), PLAIN)
        for row in rows:
            row.guard = guard
        method = self._prepare(rows, choice, plan)
        self._round(prompts, rows, method, plan).join(rows[0].beside, prompts)

    def _prepare(self, rows: list[Row], choice: Choice, plan: Plan) -> Method:
        """Say in the rows how they are decoded; the method, as this plan plays it.

        Plain decoding is the same whatever the method, so all that decode plainly do so together.
        """
        method, together = rows[0].method, list(rows)
        if not plan.kinds:
            method = Method(AUTOREGRESSIVE, temperature=method.temperature, seed=method.seed)
        for index, row in enumerate(together):
            row.choice, row.prompt, row.beside = choice, index, together
            row.limit = row.spec.max_tokens
            if row.spec.is_action:
                row.limit += method.loop.num_behind
        return method

    def _round(self, prompts: Prompts, rows: list[Row], method: Method, plan: Plan) -> BatchSteps:
        """One that plays this and has room, else one in an idle batch, else one in a new batch.

        A new batch has room for as many rows as its method has on the way: memory is bounded by
        what is served, whatever methods callers name, and rows soon meet in one batch again.
        """
        playing = [one for one in self._playing if one.plays(method, plan)]
        for one in playing:
            if self._fits(one.batch, prompts, rows):
                return one
        wanted = len(rows) + sum(len(one.batch.running) for one in playing)
        wanted = max(len(rows), min(wanted, _MOST_ROWS))
        idle = [batch for batch in self._rounds if not batch.running]
        able = [batch for batch in idle if batch.longest or batch.capacity >= wanted]
        batch = next((one for one in able if self._fits(one, prompts, rows)), None)
        for other in idle:
            if other is not batch and not other.longest:  # what nobody uses is not kept
                del self._rounds[other]
                other.free()
        if batch is None:
            batch = self._new_batch(1 << (wanted - 1).bit_length(), prompts, rows)
        return self._switch(batch, method, plan)

    def _switch(self, batch: Batch, method: Method, plan: Plan) -> BatchSteps:
        """The round by which an idle batch plays a method from now on."""
        known = [one for one in (*self._captured, *self._rounds.values()) if one.batch is batch]
        found = next((one for one in known if one.plays(method, plan)), None)
        if found is None:
            sources = dict(item for one in known for item in one.sources.items())
            found = BatchSteps(self.target, batch, method, plan, self._makers, sources)
        self._rounds[batch] = found
        return found

    def _fits(self, batch: Batch, prompts: Prompts, rows: Sequence[Row]) -> bool:
        """Whether there is room for these beside those that are on their way."""
        running = batch.running
        longest, most = prompts.embeds.shape[1], max(row.limit for row in rows)
        if batch.longest:
            reserve = self.target.runner.reserve
            has_slots = reserve is not None and reserve.holds(len(prompts.lengths), longest)
        else:
            has_slots = longest + most + batch.widest <= batch.num_slots
        return (
            has_slots
            and batch.capacity - len(running) >= len(rows)
            and all(one.spec.is_action == rows[0].spec.is_action for one in running)
            and batch.widest == self._widest_of(rows)
            and most <= batch.positions
            and max(row.spec.action_length for row in rows) <= batch.places
        )

    def _widest_of(self, rows: Sequence[Row]) -> int:
        """Nodes of a tree: what actions are drafted by makes no wider ones."""
        of_actions = all(row.spec.is_action for row in rows)
        return min(self._widest, WIDEST) if of_actions else self._widest

    def _new_batch(
        self, num_rows: int, prompts: Prompts, rows: Sequence[Row], longest: int = 0
    ) -> Batch:
        """Room for so many answers like these, and for what a loop may look at behind them."""
        positions = 1 + max(row.spec.max_tokens for row in rows)
        places, widest = 1 + max(row.spec.action_length for row in rows), self._widest_of(rows)
        target, nodes = self.target, bucket(widest)
        num_slots = (longest or prompts.embeds.shape[1]) + positions + nodes
        batch = Batch(target.device, num_rows, positions, places, nodes, longest)
        batch.widest, batch.num_slots = widest, num_slots + -num_slots % STRIP
        batch.cache = target.new_cache()
        if longest:
            batch.cache.fix(num_rows, num_slots)
            target.record(batch.cache, widest)
        else:
            batch.cache.reserve(num_rows, batch.num_slots)
        return batch

    def _guard(self, method: Method, plans: Sequence[Plan], spec: AnswerSpec) -> Guard | None:
        """The guard for answers like these; None where there is nothing to choose."""
        if not method.is_guarded or tuple(plans) == (PLAIN,):
            return None
        length = spec.max_tokens if spec.is_action else 0
        key = method.name, str(method.rule), length
        guard = self._guards.pop(key, None) or Guard(plans)
        self._guards[key] = guard
        if len(self._guards) > _GUARDS_KEPT:
            # Methods that callers make up push out no method that has a name of its own.
            made_up = [key for key in self._guards if ":" in key[0]]
            del self._guards[made_up[0] if made_up else next(iter(self._guards))]
        return guard


def _is_alike(row: Row, other: Row) -> bool:
    """Whether two answers begin together."""
    has_length = row.spec.max_tokens == other.spec.max_tokens
    is_like = row.spec.is_action == other.spec.is_action
    return has_length and is_like and row.method == other.method


def _choose(guard: Guard, rows: Sequence[Row]) -> Choice:
    """By the guard, which takes texts to be as long as the last ones.

    The first text of a session has nothing to draft from, so it is decoded plainly.
    """
    if rows[0].spec.is_action:
        length = rows[0].spec.max_tokens
    elif any(row.has_history for row in rows):
        length = max(len(row.memory.answer) for row in rows)
    else:
        return Choice(PLAIN.name, "no text to draft from yet")
    sessions = [row.memory.passes_needed for row in rows]
    return guard.choose(sessions, length, may_try=all(row.has_history for row in rows))


def _learn_passes(guard: Guard, row: Row) -> None:
    """Tell a guard, and the session, what an answer has needed.

    With exact match it can be counted what plans that only repeat the last action would have
    needed: one pass for every token that changed, or, where only the prefill repeats it, one for
    every token behind the first that changed.
    """
    if not row.has_history:
        return
    needed = dict(row.memory.passes_needed)
    guard.learn_passes(row.choice.plan, row.num_passes - 1, needed)
    own = row.memory.own
    if row.spec.is_action and row.method.rule.is_exact and len(own) > 1:
        is_changed = [a != b for a, b in zip(own[-2][:-1], row.tokens[:-1], strict=True)]
        num_behind = len(is_changed) - is_changed.index(True) if any(is_changed) else 0
        for plan in row.method.plans:
            if plan.name != row.choice.plan and plan.kinds == {kinds.PREVIOUS}:
                num_passes = sum(is_changed) if plan.rounds else num_behind
                guard.learn_passes(plan.name, num_passes, needed)
    row.memory = replace(row.memory, passes_needed=needed)


def _blank_row(method: Method, spec: AnswerSpec, num_steps: int) -> Row:
    """As of a session that has acted so many times, always alike."""
    own = ((0,) * spec.action_length,) * num_steps
    return Row(
        method, spec, SessionMemory(own=own, answer=(0,) * _WARM_UP_TOKENS * bool(num_steps))
    )
