"""The never-slower guard: picks a plan per session from measured costs and recent acceptance.

A plan's price for one action is what its prefill has cost, plus the passes it is expected to need
after that times what one of them has cost, drafting included. Plain decoding is always among the
plans, and its price is measured like the others'. The cheapest plan by these numbers is used; other
plans are tried again now and then, so rarely that trying costs at most a small share of the time,
and never if they would be slower even with perfect drafts.

Decides and remembers only: it is told what things cost and reads no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deft_policies.decoding.history import Average, PassesNeeded

_SAMPLES_NEEDED = 2


@dataclass(frozen=True)
class ActionCost:
    """What one batch has cost in milliseconds, and the passes its rows needed after the prefill."""

    prefill_ms: float  # drafting for it included
    passes_ms: float  # everything after the prefill
    num_passes: tuple[int, ...]  # [row]


@dataclass(frozen=True)
class GuardSettings:
    """How quickly the guard believes, and how much it may spend on finding out."""

    weight: float = 0.15  # of the newest measurement in a moving average
    outlier: float = 2.0  # a measurement counts as at most this multiple of the average
    margin: float = 0.02  # by which a plan must beat plain decoding
    explore_share: float = 0.01  # of the time, at most, spent on plans that look worse
    min_interval: int = 8  # actions between two explorations


@dataclass(frozen=True)
class Choice:
    """The plan to use, and why, for the trace."""

    plan: str
    reason: str
    is_trial: bool = False


@dataclass(eq=False)
class _PlanCost:
    """What a plan has cost at batches of about one size."""

    prefill_ms: Average = field(default_factory=Average)
    pass_ms: Average = field(default_factory=Average)
    last_used: int = 0

    def price(self, passes: float) -> float:
        return self.prefill_ms.value + passes * self.pass_ms.value


class Guard:
    """Chooses among plans by name. `plain` needs `plain_passes` after the prefill, always."""

    def __init__(
        self,
        plans: Sequence[str],
        plain: str,
        plain_passes: int,
        settings: GuardSettings | None = None,
    ) -> None:
        self._plans = tuple(dict.fromkeys((*plans, plain)))
        self._plain = plain
        self._plain_passes = plain_passes
        self._settings = settings or GuardSettings()
        self._costs: dict[tuple[str, int], _PlanCost] = {}
        self._usual: PassesNeeded = {}  # over all sessions
        self._num_actions = 0
        self._last_trial = 0

    def choose(self, sessions: Sequence[PassesNeeded], may_try: bool = True) -> Choice:
        """Pick the plan of the next batch; one that looks worse is tried only if that is fair."""
        size = _size(sessions)
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
        self, choice: Choice, cost: ActionCost, sessions: Sequence[PassesNeeded | None]
    ) -> None:
        """Take in what a batch has cost and needed.

        None stands for a session that had nothing to draft from, as at the start of an episode:
        the passes it needed say nothing about those to come.
        """
        self.learn_cost(choice.plan, cost)
        for session, passes in zip(sessions, cost.num_passes, strict=True):
            if session is not None:
                self.learn_passes(choice.plan, passes, session)
        if choice.is_trial:
            self._last_trial = self._num_actions

    def learn_cost(self, plan: str, cost: ActionCost) -> None:
        """Take in what a batch by `plan` has cost, and nothing about acceptance."""
        settings = self._settings
        self._num_actions += 1
        known = self._costs.setdefault((plan, _size(cost.num_passes)), _PlanCost())
        known.last_used = self._num_actions
        known.prefill_ms.add_time(cost.prefill_ms, settings.weight, settings.outlier)
        longest = max(cost.num_passes)
        if longest > 0:
            pass_ms = cost.passes_ms / longest
            known.pass_ms.add_time(pass_ms, settings.weight, settings.outlier)

    def learn_passes(self, plan: str, passes: int, session: PassesNeeded) -> None:
        """Take in how many passes a plan has needed, or would have, and nothing about cost."""
        for table in (session, self._usual):
            table.setdefault(plan, Average()).add(passes, self._settings.weight)

    def expected_ms(self, plan: str, sessions: Sequence[PassesNeeded]) -> float:
        """The plan's price for these sessions together; they wait for the slowest of them."""
        passes = max(self._expected_passes(plan, session) for session in sessions)
        return self._costs[plan, _size(sessions)].price(passes)

    def _is_known(self, plan: str, size: int) -> bool:
        """Once is not enough: whatever runs for the first time warms things up."""
        cost = self._costs.get((plan, size))
        return cost is not None and cost.prefill_ms.count >= _SAMPLES_NEEDED

    def _expected_passes(self, plan: str, session: PassesNeeded) -> float:
        """What the session needed lately, else what sessions usually need, else half of plain."""
        if plan == self._plain:
            return self._plain_passes
        known = session.get(plan) or self._usual.get(plan)
        return known.value if known is not None else self._plain_passes / 2

    def _cheapest(self, prices: Mapping[str, float]) -> str:
        """The cheapest plan; plain decoding unless it is clearly beaten."""
        best = min(prices, key=lambda plan: prices[plan])
        is_clear = prices[best] < prices[self._plain] * (1 - self._settings.margin)
        return best if is_clear else self._plain

    def _worth_trying(
        self, unknown: Sequence[str], prices: Mapping[str, float], best: str, size: int
    ) -> str | None:
        """A plan to try now, if one is due: unknown ones first, then the longest unused."""
        if self._num_actions - self._last_trial < self._settings.min_interval:
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
            return self._settings.min_interval
        extra = max(prices[plan] - prices[best], 0.0)
        allowed = self._settings.explore_share * prices[best] / max(len(prices) - 1, 1)
        return max(extra / allowed if allowed > 0 else 0.0, float(self._settings.min_interval))


def _size(rows: Sequence[object]) -> int:
    """Batches of about the same size cost about the same: 1, 2, up to 4, up to 8..."""
    return (len(rows) - 1).bit_length()
