"""The never-slower guard: picks a plan per session from measured costs and recent acceptance.

A plan's price for one action is what its prefill has cost, plus the passes it is expected to need
after that times what one of them has cost, drafting included. Plain decoding is always among the
plans, and its price is measured like the others'. The cheapest plan by these numbers is used; other
plans are tried again now and then, so rarely that trying costs at most a small share of the time,
and never if they would be slower even with perfect drafts.

Decides and remembers only: it is told what things cost and reads no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """What a plan has cost at batches of about one size."""

    prefill_ms: Average = Average()
    pass_ms: Average = Average()
    last_used: int = 0

    def price(self, passes: float) -> float:
        return self.prefill_ms.value + passes * self.pass_ms.value


class Guard:
    """Chooses among plans by name. `plain` needs `plain_passes` after the prefill, always."""

    def __init__(self, plans: Sequence[str], plain: str, plain_passes: int) -> None:
        self._plans = tuple(dict.fromkeys((*plans, plain)))
        self._plain = plain
        self._plain_passes = plain_passes
        self._costs: dict[tuple[str, int], _PlanCost] = {}
        self._usual: dict[str, Average] = {}  # passes needed, over all sessions
        self._num_actions = 0
        self._last_trial = 0

    def choose(self, sessions: Sequence[Needed], may_try: bool = True) -> Choice:
        """Pick the plan of the next batch; one that looks worse is tried only if that is fair."""
        size = _size(len(sessions))
        unknown = [plan for plan in self._plans if not self._is_known(plan, size)]
        if self._plain in unknown:
            return Choice(self._plain, "measuring plain decoding", is_trial=True)
        known = [plan for plan in self._plans if plan not in unknown]
        prices = {plan: self.expected_ms(plan, sessions) for plan in known}
        best = self._cheapest(prices)
        tried = self._worth_trying(unknown, prices, best, size) if may_try else None
        if tried is not None:
            return Choice(tried, f"trying {tried} beside {best}", is_trial=True)
        others = [plan for plan in known if (plan == self._plain) != (best == self._plain)]
        rival = min(others, key=lambda plan: prices[plan], default=None)
        against = f", {prices[rival]:.2f} ms with {rival}" if rival is not None else ""
        return Choice(best, f"expects {prices[best]:.2f} ms with {best}{against}")

    def learn(
        self,
        choice: Choice,
        num_rows: int,
        prefill_ms: float,
        passes_ms: float,
        num_passes: int,
    ) -> None:
        """Take in what a batch has cost: its prefill, and the `num_passes` behind it together.

        Drafting is part of both.
        """
        self._num_actions += 1
        known = self._costs.setdefault((choice.plan, _size(num_rows)), _PlanCost())
        known.last_used = self._num_actions
        known.prefill_ms = known.prefill_ms.with_time(prefill_ms, _WEIGHT, _OUTLIER)
        if num_passes > 0:
            known.pass_ms = known.pass_ms.with_time(passes_ms / num_passes, _WEIGHT, _OUTLIER)
        if choice.is_trial:
            self._last_trial = self._num_actions

    def learn_passes(self, plan: str, passes: int, session: dict[str, Average]) -> None:
        """Take in how many passes a plan has needed for an answer, or would have."""
        for table in (session, self._usual):
            table[plan] = table.get(plan, Average()).with_sample(passes, _WEIGHT)

    def expected_ms(self, plan: str, sessions: Sequence[Needed]) -> float:
        """The plan's price for these sessions together; they wait for the slowest of them."""
        passes = max(self._expected_passes(plan, session) for session in sessions)
        return self._costs[plan, _size(len(sessions))].price(passes)

    def _is_known(self, plan: str, size: int) -> bool:
        """Once is not enough: whatever runs for the first time warms things up."""
        cost = self._costs.get((plan, size))
        return cost is not None and cost.prefill_ms.count >= _SAMPLES_NEEDED

    def _expected_passes(self, plan: str, session: Needed) -> float:
        """What the session needed lately, else what sessions usually need, else half of plain."""
        if plan == self._plain:
            return self._plain_passes
        known = session.get(plan) or self._usual.get(plan)
        return known.value if known is not None else self._plain_passes / 2

    def _cheapest(self, prices: Mapping[str, float]) -> str:
        """The cheapest plan; plain decoding unless it is clearly beaten."""
        best = min(prices, key=lambda plan: prices[plan])
        is_clear = prices[best] < prices[self._plain] * (1 - _MARGIN)
        return best if is_clear else self._plain

    def _worth_trying(
        self, unknown: Sequence[str], prices: Mapping[str, float], best: str, size: int
    ) -> str | None:
        """A plan to try now, if one is due: unknown ones first, then the longest unused."""
        if self._num_actions - self._last_trial < MIN_INTERVAL:
            return None
        if unknown:
            return unknown[0]
        rested = {
            plan: self._num_actions - self._costs[plan, size].last_used
            for plan in prices
            if plan != best and self._costs[plan, size].price(1) < prices[best]
        }
        due = [plan for plan, rest in rested.items() if rest >= self._interval(plan, prices, best)]
        return max(due, key=lambda plan: rested[plan]) if due else None

    def _interval(self, plan: str, prices: Mapping[str, float], best: str) -> float:
        """Actions to wait before trying a plan again, so that trials stay within their share.

        Each of the plans that are not in use gets an equal part of the share. A plan whose drafts
        nobody has seen yet, as after warming up, has no price worth believing, and waits no longer
        than it must.
        """
        if plan not in self._usual:
            return MIN_INTERVAL
        extra = max(prices[plan] - prices[best], 0.0)
        allowed = _EXPLORE_SHARE * prices[best] / max(len(prices) - 1, 1)
        return max(extra / allowed if allowed > 0 else 0.0, float(MIN_INTERVAL))


def _size(num_rows: int) -> int:
    """Batches of about the same size cost about the same: 1, 2, up to 4, up to 8..."""
    return (num_rows - 1).bit_length()
