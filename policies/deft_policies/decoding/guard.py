"""The guard of exact methods: which plan is the fastest here, as answers have been lately.

It decides for a server and a method, not for a frame or a session: once for answers that are
decoded alone or with one other, and once for those among more, where a CPU pays for every further
token. Prices were measured when the policy warmed up; what is learned while serving is how many
passes each plan needs. An exact method answers the same by every plan, so trying another now and
then changes no answer. Reads no clock.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deft_policies.decoding.plan import PLAIN, Plan

_log = logging.getLogger(__name__)
DECIDE_EVERY = 64  # answers between two decisions
_TRIAL_EVERY = 16  # answers between two trials, until every plan is known; then DECIDE_EVERY
_SAMPLES_NEEDED = 4  # answers of a plan that are believed
_WEIGHT = 0.05  # of the newest answer in a moving average
_MARGIN = 0.02  # by which a plan must beat plain decoding
AMONG = 4  # answers at a time that are timed for those among others
_FOR_TRIALS = 0.03  # of the time of answers: what trials of known plans may cost beyond the choice


@dataclass(frozen=True)
class Choice:
    """The plan to use, and why, for the trace."""

    plan: str
    reason: str = ""


@dataclass(frozen=True)
class Price:
    """Milliseconds that a plan was measured to take, drafting included, in passes of some rows."""

    prefill_ms: float
    pass_ms: float  # of each later pass

    def of(self, num_passes: float) -> float:
        """An answer with so many later passes."""
        return self.prefill_ms + num_passes * self.pass_ms


@dataclass
class _Average:
    value: float = 0.0
    count: int = 0

    def add(self, sample: float) -> None:
        """The first few samples weigh more."""
        self.count += 1
        self.value += max(_WEIGHT, 1.0 / self.count) * (sample - self.value)


class Guard:
    """Chooses among plans and plain decoding, which takes a pass for every token but the first."""

    def __init__(self, plans: Sequence[Plan], length: int, name: str = "") -> None:
        """Of answers of `length` tokens, by a method that the `name` says."""
        self.name = name
        self._plans = {plan.name: plan for plan in (*plans, PLAIN)}
        self._length = length
        self._prices: dict[str, Price] = {}
        self._needed = {name: _Average() for name in self._plans}
        self._num_answers = 0
        self._trials = 0
        self._allowed_ms = 0.0  # what trials of known plans may still cost
        self.choice = Choice(PLAIN.name, "nothing was measured yet")
        self.has_decided = False

    def set_prices(self, prices: Mapping[str, Price]) -> None:
        """Take in what passes cost here, and decide."""
        self._prices = dict(prices)
        self._decide()

    def choose(self) -> Choice:
        """The plan of the next answer: the one decided on, or one that is tried."""
        self._num_answers += 1
        if self._num_answers % DECIDE_EVERY == 0:
            self._decide()
        return self._trial() or self.choice

    def learn(self, plan: str, num_passes: int) -> None:
        """Take in how many passes behind the prefill an answer has needed.

        A plan that was chosen because nothing was known of it is judged as soon as it is known.
        """
        self._needed[plan].add(num_passes)
        if self._needed[plan].count == _SAMPLES_NEEDED:
            self._decide()

    def expected_ms(self, plan: str) -> float:
        """The price of an answer by a plan."""
        return self._prices[plan].of(self._expected_passes(plan))

    def _expected_passes(self, plan: str) -> float:
        """As answers were lately; half of plain decoding's where too few were seen."""
        if plan == PLAIN.name:
            return self._length - 1
        known = self._needed[plan]
        return known.value if known.count >= _SAMPLES_NEEDED else (self._length - 1) / 2

    def _decide(self) -> None:
        if PLAIN.name not in self._prices:
            return
        prices = {plan: self.expected_ms(plan) for plan in self._prices}
        best = min(prices, key=lambda plan: prices[plan])
        if prices[best] > prices[PLAIN.name] * (1 - _MARGIN):
            best = PLAIN.name
        others = [plan for plan in prices if (plan == PLAIN.name) != (best == PLAIN.name)]
        rival = min(others, key=lambda plan: prices[plan], default=None)
        against = f", {prices[rival]:.2f} ms with {rival}" if rival is not None else ""
        is_new = self.choice.plan != best or not self.has_decided
        self.has_decided = True
        self.choice = Choice(best, f"expects {prices[best]:.2f} ms with {best}{against}")
        if is_new:
            _log.info("%s drafts by plan %s: %s", self.name, best, self.choice.reason)

    def _trial(self) -> Choice | None:
        """A plan to try now, if one is due: in turn, where it could be the fastest at all.

        A plan that is known to be dear is tried the less often the dearer it is.
        """
        if self.choice.plan not in self._prices:
            return None
        best = self.expected_ms(self.choice.plan)
        self._allowed_ms += _FOR_TRIALS * best
        unknown = [
            plan
            for plan in self._prices
            if plan != PLAIN.name and self._needed[plan].count < _SAMPLES_NEEDED
        ]
        if self._num_answers % (_TRIAL_EVERY if unknown else DECIDE_EVERY) != 1:
            return None
        worth = [
            plan
            for plan in unknown or self._prices
            if plan not in (self.choice.plan, PLAIN.name) and self._prices[plan].of(1) < best
        ]
        if not worth:
            return None
        self._trials += 1
        plan = worth[self._trials % len(worth)]
        if not unknown:
            beyond_ms = max(0.0, self.expected_ms(plan) - best)
            if beyond_ms > self._allowed_ms:
                return None
            self._allowed_ms -= beyond_ms
        return Choice(plan, f"trying {plan} instead of {self.choice.plan}")


def best_width(pass_ms: Mapping[int, float], edits_apart: int) -> int:
    """How many nodes of an old text a pass should carry, of those whose passes were timed.

    A pass writes one token and those of the old text up to the next edit. With edits so many tokens
    apart, the best width is the one that writes most in a millisecond.
    """

    def written_in_a_ms(width: int) -> float:
        keeps_on = 1 - 1 / edits_apart
        written = 1 + edits_apart * (1 - keeps_on ** (width - 1))
        return written / pass_ms[width]

    return max(pass_ms, key=written_in_a_ms)
