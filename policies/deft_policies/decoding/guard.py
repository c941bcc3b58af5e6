"""The never-slower guard: picks a plan per session from measured costs and recent acceptance.

A plan's price for one answer is what a prefill as wide as this one has cost, plus the passes it is
expected to need after that times what one of them has cost, drafting included. Plain decoding is
always among the plans, and its price is measured like the others'. The cheapest plan by these
numbers is used; other plans are tried again now and then, so rarely that trying costs at most a
small share of the time, and never if they would be slower even with perfect drafts.

Decides and remembers only: it is told what things cost and reads no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deft_policies.memory import Average

MIN_INTERVAL = 8  # actions between two explorations
_SAMPLES_NEEDED = 2
_WEIGHT = 0.15  # of the newest measurement in a moving average
_OUTLIER = 2.0  # a measurement counts as at most this multiple of the average
_MARGIN = 0.02  # by which a plan must beat plain decoding
_EXPLORE_SHARE = 0.01  # of the time, at most, spent on plans that look worse

Needed = Mapping[str, Average]  # passes after the prefill, lately, by the name of the plan


@dataclass(frozen=True)
class Choice:
    """The plan to use, and why, for the trace."""

    plan: str
    reason: str
    is_trial: bool = False


@dataclass(eq=False)
class _PlanCost:
    """What a plan has cost at batches of about one size, by the size of a pass's width."""

    prefill_ms: dict[int, Average] = field(default_factory=dict)
    pass_ms: dict[int, Average] = field(default_factory=dict)
    num_samples: int = 0
    last_used: int = 0

    def price(self, passes: float, width: int) -> float:
        """Of a prefill of about that width, and of passes as wide as they were so far."""
        nearest = min(self.prefill_ms, key=lambda size: abs(size - _size(width)))
        num_known = sum(one.count for one in self.pass_ms.values())
        known_ms = sum(one.count * one.value for one in self.pass_ms.values())
        return self.prefill_ms[nearest].value + passes * known_ms / max(num_known, 1)


class Guard:
    """Chooses among plans by name. `plain` takes a pass for every token but the first."""

    def __init__(self, plans: Sequence[str], plain: str) -> None:
        self._plans = tuple(dict.fromkeys((*plans, plain)))
        self._plain = plain
        self._costs: dict[tuple[str, int], _PlanCost] = {}
        self._usual: dict[str, Average] = {}  # passes needed, over all sessions
        self._num_actions = 0
        self._last_trial = 0

    def choose(self, sessions: Sequence[Needed], length: int, may_try: bool = True) -> Choice:
        """Pick the plan of the next batch, whose answers will have about `length` tokens.

        One that looks worse is tried only if that is fair.
        """
        size = _size(len(sessions))
        unknown = [plan for plan in self._plans if not self._is_known(plan, size)]
        if self._plain in unknown:
            return Choice(self._plain, "measuring plain decoding", is_trial=True)
        known = [plan for plan in self._plans if plan not in unknown]
        prices = {plan: self.expected_ms(plan, sessions, length) for plan in known}
        best = self._cheapest(prices)
        tried = self._worth_trying(unknown, prices, best, size, length) if may_try else None
        if tried is not None:
            return Choice(tried, f"trying {tried} beside {best}", is_trial=True)
        others = [plan for plan in known if (plan == self._plain) != (best == self._plain)]
        rival = min(others, key=lambda plan: prices[plan], default=None)
        against = f", {prices[rival]:.2f} ms with {rival}" if rival is not None else ""
        return Choice(best, f"expects {prices[best]:.2f} ms with {best}{against}")

    def learn(self, choice: Choice, num_rows: int, passes: Sequence[tuple[int, float]]) -> None:
        """Take in the width and the milliseconds of a batch's passes, the prefill's first.

        Drafting is part of them.
        """
        self._num_actions += 1
        known = self._costs.setdefault((choice.plan, _size(num_rows)), _PlanCost())
        known.last_used = self._num_actions
        known.num_samples += 1
        by_size: dict[int, list[float]] = {}
        for width, ms in passes[1:]:
            by_size.setdefault(_size(width), []).append(ms)
        taken = [(known.pass_ms, size, sum(ms) / len(ms)) for size, ms in by_size.items()]
        for costs, size, ms in [(known.prefill_ms, _size(passes[0][0]), passes[0][1]), *taken]:
            costs[size] = costs.get(size, Average()).with_time(ms, _WEIGHT, _OUTLIER)
        if choice.is_trial:
            self._last_trial = self._num_actions

    def learn_passes(self, plan: str, passes: int, session: dict[str, Average]) -> None:
        """Take in how many passes a plan has needed for an answer, or would have."""
        for table in (session, self._usual):
            table[plan] = table.get(plan, Average()).with_sample(passes, _WEIGHT)

    def expected_ms(self, plan: str, sessions: Sequence[Needed], length: int) -> float:
        """The plan's price for these sessions together; they wait for the slowest of them."""
        passes = max(self._expected_passes(plan, session, length) for session in sessions)
        return self._costs[plan, _size(len(sessions))].price(passes, length)

    def _is_known(self, plan: str, size: int) -> bool:
        """Once is not enough: whatever runs for the first time warms things up."""
        cost = self._costs.get((plan, size))
        return cost is not None and cost.num_samples >= _SAMPLES_NEEDED

    def _expected_passes(self, plan: str, session: Needed, length: int) -> float:
        """As the session lately, else as sessions usually, else a quarter of plain's."""
        if plan == self._plain:
            return length - 1
        known = session.get(plan) or self._usual.get(plan)
        return known.value if known is not None else (length - 1) / 4

    def _cheapest(self, prices: Mapping[str, float]) -> str:
        """The cheapest plan; plain decoding unless it is clearly beaten."""
        best = min(prices, key=lambda plan: prices[plan])
        is_clear = prices[best] < prices[self._plain] * (1 - _MARGIN)
        return best if is_clear else self._plain

    def _worth_trying(
        self,
        unknown: Sequence[str],
        prices: Mapping[str, float],
        best: str,
        size: int,
        length: int,
    ) -> str | None:
        """A plan to try now, if one is due: unknown ones first, then the longest unused."""
        if self._num_actions - self._last_trial < MIN_INTERVAL:
            return None
        if unknown:
            return unknown[0]
        rested = {
            plan: self._num_actions - self._costs[plan, size].last_used
            for plan in prices
            if plan != best and self._costs[plan, size].price(1, length) < prices[best]
        }
        due = [plan for plan, rest in rested.items() if rest >= self._interval(plan, prices, best)]
        return max(due, key=lambda plan: rested[plan]) if due else None

    def _interval(self, plan: str, prices: Mapping[str, float], best: str) -> float:
        """Actions to wait before trying a plan again, so that trials stay within their share.

        Each of the plans that are not in use gets an equal part of the share. A plan whose drafts
        nobody has seen yet, as after warming up, has no price worth believing, and waits no longer
        than it must.
        """
        if plan != self._plain and plan not in self._usual:
            return MIN_INTERVAL
        extra = max(prices[plan] - prices[best], 0.0)
        allowed = _EXPLORE_SHARE * prices[best] / max(len(prices) - 1, 1)
        return max(extra / allowed if allowed > 0 else 0.0, float(MIN_INTERVAL))


def _size(num_rows: int) -> int:
    """Batches of about the same size cost about the same: 1, 2, up to 4, up to 8..."""
    return (num_rows - 1).bit_length()
