"""Planner: by which plan an answer is drafted, and what drafts.

It holds the draft sources that there are, what plans were measured to cost, and the guard of each
exact method. An answer is prepared once, before its prefill; later rounds read what was decided.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial

from deft_policies.decoding import kinds
from deft_policies.decoding.drafts import DraftSource, PluginSource, heads
from deft_policies.decoding.drafts import session as of_session
from deft_policies.decoding.drafts.block import BlockDrafts
from deft_policies.decoding.drafts.numbers import PreviousNumbers
from deft_policies.decoding.drafts.previous_answer import PreviousAnswer
from deft_policies.decoding.drafts.small_model import SmallModelDrafts
from deft_policies.decoding.guard import AMONG, Choice, Guard, Price
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import (
    DEFAULT_PLANS,
    NUMBER_PLANS,
    PLAIN,
    TEXT_PLANS,
    KeyMask,
    Plan,
    RopeOffset,
)
from deft_policies.decoding.plugins import ask_rule, find_plugins, from_files
from deft_policies.decoding.sampling import noise_key
from deft_policies.decoding.sequence import AnswerSpec, Sequence
from deft_policies.decoding.target import Prompt, Target
from deft_policies.errors import RequestError
from deft_policies.model.block_head import BlockHead
from deft_policies.model.draft_heads import EagleHead, MedusaHeads

Maker = Callable[[], DraftSource]
WIDEST = 64  # nodes of a tree of actions
_MOST_PREFILL_SOURCES = 3
_STEADY_WIDTH = 32  # nodes of a later pass over text where the answer depends on it
_GUARDS_KEPT = 128


@dataclass(frozen=True)
class DraftModels:
    """What drafts with weights of its own; None for what is not there."""

    head: EagleHead | None = None
    rope_offset: RopeOffset = RopeOffset.CORRECT
    key_mask: KeyMask = KeyMask.CAUSAL
    medusa: MedusaHeads | None = None
    block: BlockHead | None = None
    others: Mapping[str, Maker] = field(default_factory=dict)  # what makes them, by kind
    small_model: Target | None = None

    def makers(self, target: Target) -> dict[str, Maker]:
        """What makes the source of every kind that needs no engine."""
        files: dict[str, Callable[[Target], DraftSource]] = from_files("SOURCES")
        makers: dict[str, Maker] = {
            **{name: partial(make, target) for name, make in files.items()},
            **self.others,
            kinds.PREVIOUS: of_session.PreviousAction,
            kinds.EXTRAPOLATION: lambda: of_session.Extrapolation(target.action_tokens),
            kinds.RECYCLED: of_session.JacobiDrafts,
        }
        if (block := self.block) is not None:
            makers[kinds.BLOCK] = lambda: BlockDrafts(block, target)
        if (medusa := self.medusa) is not None:
            makers[kinds.MEDUSA] = lambda: heads.MedusaDrafts(medusa, target)
        if (head := self.head) is not None:
            makers[kinds.HEAD] = lambda: heads.EagleDrafts(
                head, target, self.rope_offset, self.key_mask
            )
        if (model := self.small_model) is not None:
            makers[kinds.SMALL_MODEL] = lambda: SmallModelDrafts(model, target)
        return makers


class Planner:
    """Prepares answers for the engine, on the engine's thread."""

    def __init__(self, target: Target, models: DraftModels | None, widest: int) -> None:
        """`widest` bounds the nodes of a tree over text."""
        self.models = models or DraftModels()
        self._target, self.widest = target, widest
        self._makers = self.models.makers(target)
        self._makers[kinds.PREVIOUS_ANSWER] = lambda: PreviousAnswer(widest, self._width_of)
        self._makers[kinds.PREVIOUS_NUMBERS] = lambda: PreviousNumbers(widest, self._width_of)
        for name, point in find_plugins(kinds.SOURCES).items():
            self._makers[name] = partial(PluginSource, point, target)
        self._sources: dict[str, DraftSource] = {}  # by kind, made when first asked for
        self._broken: dict[str, RequestError] = {}  # sources that could not be made
        # By a method's text, its rule, an action's tokens, and rows; the last used comes last.
        self.guards: dict[tuple[str, str, int, int], Guard] = {}
        # Measured before anybody waits, of so many rows: 1 or `AMONG`.
        self.prices: dict[int, dict[Plan, Price]] = {1: {}}
        self.text_width = widest  # nodes of a later pass over text, of exact methods with a guard
        self.has_timed_widths = False

    def has_source(self, kind: str) -> bool:
        """Whether a source can be asked for."""
        return kind in self._makers

    def plans(self, method: Method) -> tuple[Plan, ...]:
        """Those of a method's plans whose sources are there; plain decoding if none.

        Raises `RequestError` when the method cannot do without a source that is missing, or that
        could not be made. Makes no source: any thread may ask.
        """
        for kind in method.required & self._broken.keys():
            raise self._broken[kind]
        available = self._makers.keys()
        missing = method.required - available
        if missing:
            names = ", ".join(sorted(missing))
            raise RequestError(
                "decoding",
                f"{method.name!r} needs draft sources that were not loaded: {names}; load a draft "
                "head (--draft-head DIR), a draft model (--draft-model DIR) or whatever they need, "
                "or choose another method",
            )
        return tuple(plan for plan in method.plans if plan.kinds <= available) or (PLAIN,)

    def check(self, sequence: Sequence) -> None:
        """Raise `RequestError` for an answer that cannot be decoded as it is asked for."""
        self.plans(sequence.method)
        method = sequence.method
        problem = ask_rule(method.rule, lambda: method.rule.problem(sequence.spec))
        if problem:
            raise RequestError("decoding", f"{method.name!r} {problem}")

    def prepare(
        self, sequence: Sequence, prompt: Prompt, tried: Plan | None = None, num_rows: int = 1
    ) -> None:
        """Write into a sequence how it is decoded: by the guard's plan, or by one that is timed.

        `num_rows` are the unfinished answers, this one included.
        """
        method, spec = sequence.method, sequence.spec
        plans = self.plans_for(method, spec)
        guard = None if tried is not None else self.guard(method, plans, spec, num_rows)
        choice, plan = Choice((tried or plans[0]).name), tried or plans[0]
        if guard is not None:
            choice = guard.choose()
            plan = next((one for one in plans if one.name == choice.plan), PLAIN)
        sequence.prompt, sequence.num_prompt = prompt, prompt.length
        sequence.grammar = prompt.grammar
        sequence.action_tokens = self._target.action_tokens
        sequence.guard, sequence.choice, sequence.shape = guard, choice, plan.shape
        sequence.limit = spec.max_tokens + method.rule.tokens_behind * spec.is_action
        if prompt.grammar is not None:  # how every answer begins: cached by the prefill
            sequence.extend(prompt.grammar.forced(()), self.widest_of(sequence) - 1)
        if method.temperature > 0.0:
            sequence.noise_key = noise_key(method.seed, sequence.memory.draw)
        sources = {kind: self.source(kind) for kind in (*plan.prefill, *plan.rounds)}
        early = [sources[kind] for kind in plan.prefill if sources[kind].early]
        sequence.prefill_sources = early[:_MOST_PREFILL_SOURCES]
        sequence.round_sources = [sources[kind] for kind in plan.rounds]
        for source in sources.values():
            with sequence.failing():
                source.begin(sequence)

    def plans_for(self, method: Method, spec: AnswerSpec) -> tuple[Plan, ...]:
        """A method's plans for such an answer; default plans depend on the kind of answer."""
        plans = self.plans(method)
        if spec.is_action or method.plans not in DEFAULT_PLANS:
            return plans
        return NUMBER_PLANS if spec.numbers_in_row else TEXT_PLANS

    def source(self, kind: str) -> DraftSource:
        """The source of a kind. One that cannot be made is tried once, and then refused by name."""
        if kind not in self._sources:
            try:
                self._sources[kind] = self._makers[kind]()
            except RequestError as error:
                self._broken[kind] = error
                raise
        return self._sources[kind]

    def _width_of(self, sequence: Sequence) -> int:
        """Nodes of a later pass over text: fixed where the answer may depend on it."""
        if not sequence.method.rule.is_exact:
            return min(_STEADY_WIDTH, self.widest)
        return self.text_width if sequence.method.is_guarded else self.widest

    def widest_of(self, sequence: Sequence) -> int:
        """Nodes of a tree at most: what actions are drafted by makes no wider ones."""
        return min(self.widest, WIDEST) if sequence.spec.is_action else self.widest

    def guard(
        self, method: Method, plans: Items[Plan], spec: AnswerSpec, num_rows: int = 1
    ) -> Guard | None:
        """The guard for answers like these; None where there is nothing to choose."""
        if not method.is_guarded or plans == (PLAIN,) or not spec.is_action:
            return None
        timed_rows = AMONG if num_rows > AMONG // 2 and AMONG in self.prices else 1
        key = method.name, str(method.rule), spec.max_tokens, timed_rows
        guard = self.guards.pop(key, None)
        if guard is None:
            name = method.name if timed_rows == 1 else f"{method.name} among others"
            guard = Guard(plans, spec.max_tokens, name)
            guard.set_prices(self.prices_of(plans, timed_rows))
        self.guards[key] = guard
        if len(self.guards) > _GUARDS_KEPT:
            # Methods that callers make up push out no method that has a name of its own.
            made_up = [key for key in self.guards if ":" in key[0]]
            del self.guards[made_up[0] if made_up else next(iter(self.guards))]
        return guard

    @property
    def decisions(self) -> dict[str, str]:
        """What the guard of each method has decided, and why. Any thread may ask."""
        reasons = {
            guard.name: f"{guard.choice.plan}: {guard.choice.reason}"
            for guard in [*self.guards.values()]
            if guard.has_decided
        }
        if self.has_timed_widths:
            reasons["texts"] = (
                f"{self.text_width} tokens a pass, which writes most in a millisecond"
            )
        return reasons

    def prices_of(self, plans: Items[Plan], num_rows: int = 1) -> dict[str, Price]:
        """What is known of plans and of plain decoding. What they cost hangs on no rule."""
        measured = self.prices.get(num_rows, {})
        return {plan.name: measured[plan] for plan in (*plans, PLAIN) if plan in measured}
