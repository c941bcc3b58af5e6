"""An answer on the host: what was asked, what has been decoded, and what happened in each pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from deft_core.types import DecodeTrace
from deft_policies.decoding.acceptance.numbers import WrittenNumbers, drift_of_steps
from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.guard import Choice, Guard
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import TreeShape
from deft_policies.decoding.trace import PassRecord, PassTraces
from deft_policies.errors import MixedAnswersError, PolicyError
from deft_policies.memory import SessionMemory
from deft_policies.model.sizes import TokenRange

if TYPE_CHECKING:
    from deft_policies.decoding.drafts import DraftSource
    from deft_policies.decoding.target import Grammar, Prompt

_NUMBERS = count(1)  # of answers; 0 is no answer's


@dataclass(frozen=True)
class AnswerSpec:
    """What an answer is: how many tokens at most, what ends it, where its actions are.

    With a `space` and no stop token an answer is one action, exactly `max_tokens` long. With a stop
    token it is text that may hold action tokens; those that follow each other are one action, and
    they alone are ever relaxed. Without a space nothing is. Text of rows of numbers has the space
    of a row, number by number.
    `ids` are what tokens are called outside, where the decoder knows none but those of answers.
    `strides` say how far tokens move on in an answer, where that is not one each: the last answer
    lines up again as a draft where the sums are equal.
    """

    max_tokens: int
    stop: int | None = None
    space: ActionSpace | None = None
    ids: tuple[int, ...] = ()
    other_stops: tuple[int, ...] = ()  # tokens that end it as well
    strides: Mapping[int, int] | None = field(default=None, hash=False)  # of tokens; 0 of others

    @staticmethod
    def action(space: ActionSpace) -> AnswerSpec:
        """One action, as OpenVLA answers."""
        return AnswerSpec(space.length, None, space)

    @property
    def action_length(self) -> int:
        """Tokens of one action, at least one."""
        return 1 if self.space is None else self.space.length

    def ends_with(self, token: int) -> bool:
        """Whether a token ends the answer."""
        return token == self.stop or token in self.other_stops

    def name(self, tokens: Items[int]) -> tuple[int, ...]:
        """Tokens as they are called outside."""
        return tuple(self.ids[token] for token in tokens) if self.ids else tuple(tokens)

    @property
    def numbers_in_row(self) -> int:
        """Numbers of an action that is written as text; 0 where none is."""
        return self.space.length if self.space and self.space.largest_number else 0

    @property
    def is_action(self) -> bool:
        """Whether the answer is an action from its first token to its last."""
        return self.stop is None and self.space is not None


@dataclass(eq=False)
class Sequence:
    """One answer: the request first, then what decoding fills in. The host owns all of it."""

    method: Method
    spec: AnswerSpec
    memory: SessionMemory = field(default_factory=SessionMemory)
    wants_margins: bool = False
    wants_log_probs: bool = False
    executed_steps: int | None = None  # of the last answer; None: as many as before
    number: int = field(default_factory=lambda: next(_NUMBERS))  # no two answers have the same

    # Set by the engine.
    action_tokens: TokenRange = TokenRange(0, -1)  # of the target
    prompt: Prompt | None = None  # until its prefill; None afterwards
    grammar: Grammar | None = None
    slot: int = -1  # in the cache; -1 before the prefill and after the end
    num_prompt: int = 0  # positions of its prompt
    limit: int = 0  # tokens that are decoded at most: a rule may look at some behind an action
    noise_key: int = 0  # of the random numbers it draws
    choice: Choice = Choice("")  # the plan
    shape: TreeShape = TreeShape()  # of trees that a model grows
    guard: Guard | None = None  # learns how many passes it took
    prefill_sources: list[DraftSource] = field(default_factory=list)
    round_sources: list[DraftSource] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)  # what sources and its rule remember of it

    # Filled in by passes.
    tokens: list[int] = field(default_factory=list)
    target_tokens: list[int] = field(default_factory=list)  # greedy, given the tokens before each
    num_cached: int = 0  # tokens whose keys and values are in the cache
    num_unread: int = 0  # tokens that are decoded, and not yet read from the device
    last: PassRecord | None = None  # of the last pass
    records: list[PassRecord] = field(default_factory=list)  # of its passes, the prefill's first
    margins: list[float] = field(default_factory=list)
    log_probs: tuple[float, ...] = ()
    is_done: bool = False
    is_finite: bool = True
    error: PolicyError | None = None  # of a plugin that it names; it ends with the round
    trace: DecodeTrace | None = None

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Have an error of a plugin fail this answer alone. The error does not leave the block."""
        try:
            yield
        except PolicyError as error:
            self.error = error

    @property
    def sources(self) -> tuple[DraftSource, ...]:
        """Whatever drafts for it."""
        return tuple(dict.fromkeys((*self.prefill_sources, *self.round_sources)))

    @property
    def count(self) -> int:
        """Tokens that are decoded, read or not."""
        return len(self.tokens) + self.num_unread

    @property
    def room(self) -> int:
        """How many guesses may still be committed: an answer's last token is always a bonus."""
        return self.limit - 1 - self.count

    @property
    def draft_depth(self) -> int:
        """How deep a model drafts: to the answer's room, or all levels of a tree of full depth."""
        return self.shape.levels if self.shape.is_full_depth else self.room

    @property
    def num_passes(self) -> int:
        """Target passes so far, the prefill included."""
        return len(self.records)

    @property
    def past(self) -> tuple[tuple[int, ...], ...]:
        """The session's last actions, the target's own tokens, the newest last.

        None where the session remembers actions of another length.
        """
        own = self.memory.own
        is_alike = self.spec.is_action and bool(own) and len(own[-1]) == self.spec.max_tokens
        return own if is_alike else ()

    @property
    def action_space(self) -> ActionSpace:
        """What the positions of an action mean; plain bins where that is unknown."""
        return self.spec.space or ActionSpace.in_bins(self.spec.action_length)

    def is_bin(self, token: int) -> bool:
        """Whether it is an action token."""
        return self.action_tokens.first <= token <= self.action_tokens.last

    def is_word(self, token: int) -> bool:
        """Whether it is a word of a text: neither an action token nor the end."""
        return not (self.spec.is_action or self.is_bin(token) or token == self.spec.stop)

    @property
    def num_action_tokens(self) -> int:
        """Tokens of the action that the last token belongs to; 0 behind other text."""
        if self.spec.is_action:
            return self.count
        others = (
            back for back, token in enumerate(reversed(self.tokens)) if not self.is_bin(token)
        )
        return next(others, len(self.tokens))

    def spent(self, num_tokens: int) -> list[int]:
        """How far the last tokens are from the target's own: executed minus own, in bins."""
        last = slice(len(self.tokens) - num_tokens, None)
        pairs = zip(self.tokens[last], self.target_tokens[last], strict=True)
        return [executed - own for executed, own in pairs]

    @property
    def knows_drift(self) -> bool:
        """Whether its drift is one of such actions."""
        return self.spec.space is not None and len(self.memory.drift) == self.spec.action_length

    @property
    def num_executed(self) -> int:
        """Steps of the last answer that the robot has executed."""
        known = self.executed_steps
        return self.memory.executed_steps if known is None else known

    @cached_property
    def drift(self) -> tuple[float, ...]:
        """Drift before this answer, [position]: executed minus the target's own, in bins.

        Where actions are written as numbers: the session's drift, plus that of the executed steps
        of its last answer.
        """
        assert self.spec.space is not None
        known = self.memory.drift if self.knows_drift else (0.0,) * self.spec.space.length
        if not self.spec.numbers_in_row or not self.memory.target_answer:
            return known
        last = (self.memory.answer, self.memory.target_answer)
        written = WrittenNumbers(*last, self.spec.space, known)
        return drift_of_steps(written, self.num_executed)

    def commit(self, record: PassRecord, result: PassResult) -> None:
        """Append the tokens of a pass: guesses on its path, then the bonus.

        Raises `MixedAnswersError` if the pass was of another answer.
        """
        if result.answer != self.number:
            raise MixedAnswersError(
                f"a pass of answer {result.answer} was read from slot {self.slot}, where answer "
                f"{self.number} was expected; nothing of this round is used"
            )
        tree, path = record.tree, record.path
        kept = path[tree.root :]
        self.tokens += [tree.tokens[node] for node in kept[1:]]
        self.tokens.append(record.bonus)
        self.target_tokens += [result.greedy[node] for node in kept]
        self.margins += [result.gaps[node] for node in kept] if result.gaps else []
        self.num_cached += len(path) - record.is_prefill  # a prefill's node 0 is the prompt's
        self.last = record
        self.is_finite = self.is_finite and result.is_finite
        self.records.append(record)
        self.is_done = self._has_ended()

    def _has_ended(self) -> bool:
        has_stopped = self.spec.ends_with(self.tokens[-1])
        has_failed = self.error is not None or not self.is_finite
        return has_stopped or has_failed or len(self.tokens) >= self.limit

    def extend(self, forced: Items[int], room: int) -> None:
        """Commit up to `room` tokens that a grammar forces: the next pass caches them.

        Those for which there is no room are forced again after that pass.
        """
        for token in forced[:room]:
            if self.is_done:
                break
            self.tokens.append(token)
            self.target_tokens.append(token)
            self.margins += [0.0] * self.wants_margins
            self.is_done = self._has_ended()

    def finish(self) -> None:
        """Make the trace, and the memory that the session goes on with."""
        kept = slice(self.spec.max_tokens)
        self.tokens, self.target_tokens = self.tokens[kept], self.target_tokens[kept]
        tokens, target_tokens = tuple(self.tokens), tuple(self.target_tokens)
        if self.spec.is_action:
            leak = self.method.rule.drift_leak
            self.memory = self.memory.after_action(tokens, target_tokens, leak)
        elif self.spec.numbers_in_row:
            known = target_tokens, self.drift, self.num_executed  # of the answer before this one
            self.memory = self.memory.after_text(tokens).after_numbers(*known)
        else:
            self.memory = self.memory.after_text(tokens)
        drafts = any(plan.kinds for plan in self.method.plans)
        self.trace = DecodeTrace(
            method=self.method.name,
            tokens=self.spec.name(tokens),
            predicted=self.spec.name(target_tokens),
            margins=tuple(self.margins[kept]),
            passes=PassTraces(self.records, self.spec.name),
            guard=self.choice.reason,
            rule=str(self.method.rule) if drafts else "",
            plan=self.choice.plan,
        )


@dataclass
class PassResult:
    """What the host has read of one answer's pass. Lists are [node]."""

    answer: int  # whose pass it was: `Sequence.number`
    predictions: list[int]  # the target's token: greedy, or drawn
    greedy: list[int]
    is_finite: bool
    gaps: list[float] = field(default_factory=list)  # between the two largest logits, if wanted
    measured: list[float] = field(default_factory=list)  # by the rule, on the device
    chosen: tuple[int, int] | None = None  # node and bonus, by a `ChoosingRule`
