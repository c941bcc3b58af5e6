"""The never-slower guard: picks a plan per session from measured costs and recent acceptance.

The price of an answer by a plan is what its prefill has cost, plus the passes it is expected to
need after that times what one of them has cost, drafting included. Plain decoding is always among
the plans. The cheapest plan is used.

Plans that do the same work share what it has cost: passes without drafts, and prefills with the
same drafts, are measured by every plan that makes them. Other plans are tried again now and then,
so rarely that trying costs at most a small share of the time, and never if they would be much
slower even with perfect drafts. Half of that share is plain decoding's.

Decides and remembers only: durations come from outside, and it reads no clock.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from deft_policies.decoding.plan import PLAIN, Plan
from deft_policies.memory import Average

MIN_INTERVAL = 8  # actions between two explorations
EXPLORE_SHARE = 0.01  # of the time, at most, spent on plans that look worse
_SAMPLES_NEEDED = 2
_SAMPLES_BELIEVED = 6  # of plain decoding: some were made while everything warmed up
_WEIGHT = 0.15  # of the newest measurement in a moving average
_HOPELESS = 1.5  # of the best price: what costs that with perfect drafts is not tried again
_MARGIN = 0.02  # by which a plan must beat plain decoding

Needed = Mapping[str, Average]  # passes after the prefill, lately, by the name of the plan


@dataclass(frozen=True)
class Choice:
    """The plan to use, and why, for the trace."""

    plan: str
    reason: str
    is_trial: bool = False


class Guard:
    """Chooses among plans and plain decoding, which takes a pass for every token but the first."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._plans = {plan.name: plan for plan in (*plans, PLAIN)}
        # Milliseconds of a pass, by its work and by about how wide it was: see `_work`.
        self._costs: dict[Hashable, dict[int, Average]] = {}
        self._num_samples: Counter[tuple[str, int]] = Counter()  # by plan and about how many rows
        self._last_used: dict[tuple[str, int], int] = {}
        self._usual: dict[str, Average] = {}  # passes needed, over all sessions
        self._num_actions = 0
        self._last_trial = 0

    def choose(self, sessions: Sequence[Needed], length: int, may_try: bool = True) -> Choice:
        """Pick the plan of the next batch, whose answers will have about `length` tokens.

        One that looks worse is tried only if that is fair.
        """
        size, plain = _size(len(sessions)), PLAIN.name
        # Once is not enough: whatever runs for the first time warms things up.
        is_known = {one: self._num_samples[one, size] >= _SAMPLES_NEEDED for one in self._plans}
        if not is_known[plain]:
            return Choice(plain, "measuring plain decoding", is_trial=True)
        known = [plan for plan in self._plans if is_known[plan]]
        prices = {plan: self.expected_ms(plan, sessions, length) for plan in known}
        best = self._cheapest(prices)
        tried = self._worth_trying(prices, best, size, length) if may_try else None
        if tried is not None:
            return Choice(tried, f"trying {tried} beside {best}", is_trial=True)
        others = [plan for plan in known if (plan == plain) != (best == plain)]
        rival = min(others, key=lambda plan: prices[plan], default=None)
        against = f", {prices[rival]:.2f} ms with {rival}" if rival is not None else ""
        return Choice(best, f"expects {prices[best]:.2f} ms with {best}{against}")

    def learn(self, choice: Choice, num_rows: int, passes: Sequence[tuple[int, float]]) -> None:
        """Take in the width and the milliseconds of a batch's passes, the prefill's first.

        Drafting is part of them.
        """
        self._num_actions += 1
        if choice.is_trial:
            self._last_trial = self._num_actions
        size = _size(num_rows)
        self._last_used[choice.plan, size] = self._num_actions
        self._num_samples[choice.plan, size] += 1
        by_work: dict[tuple[Hashable, int], list[float]] = {}
        prefill, later = self._work(choice.plan, size)
        for index, (width, ms) in enumerate(passes):
            by_work.setdefault((later if index else prefill, _size(width)), []).append(ms)
        for (work, width), taken in by_work.items():
            costs = self._costs.setdefault(work, {})
            mean = sum(taken) / len(taken)
            costs[width] = costs.get(width, Average()).with_time(mean, _WEIGHT)

    def learn_passes(self, plan: str, passes: int, session: dict[str, Average]) -> None:
        """Take in how many passes a plan has needed for an answer, or would have."""
        for table in (session, self._usual):
            table[plan] = table.get(plan, Average()).with_sample(passes, _WEIGHT)

    def expected_ms(self, plan: str, sessions: Sequence[Needed], length: int) -> float:
        """The plan's price for these sessions together; they wait for the slowest of them."""
        passes = max(self._expected_passes(plan, session, length) for session in sessions)
        return self._price(plan, _size(len(sessions)), passes, length)

    def _work(self, plan: str, size: int) -> tuple[Hashable, Hashable]:
        """What its prefill does, and its later passes. Plans that do the same share its cost."""
        found = self._plans[plan]
        shape = found.shape if found.rounds else None
        return (size, "prefill", found.prefill), (size, found.rounds, shape)

    def _price(self, plan: str, size: int, passes: float, length: int) -> float:
        """Of a prefill of about that width, and of passes as wide as they were so far."""
        prefill, later = (self._costs.get(work, {}) for work in self._work(plan, size))
        nearest = min(prefill, key=lambda width: abs(width - _size(length)))
        num_known = sum(one.count for one in later.values())
        known_ms = sum(one.count * one.value for one in later.values())
        return prefill[nearest].value + passes * known_ms / max(num_known, 1)

    def _expected_passes(self, plan: str, session: Needed, length: int) -> float:
        """As the session lately, else as sessions usually, else a quarter of plain's."""
        if plan == PLAIN.name:
            return length - 1
        known = session.get(plan) or self._usual.get(plan)
        return known.value if known is not None else (length - 1) / 4

    def _cheapest(self, prices: Mapping[str, float]) -> str:
        """The cheapest plan; plain decoding unless it is clearly beaten."""
        best = min(prices, key=lambda plan: prices[plan])
        is_clear = prices[best] < prices[PLAIN.name] * (1 - _MARGIN)
        return best if is_clear else PLAIN.name

    def _worth_trying(
        self, prices: Mapping[str, float], best: str, size: int, length: int
    ) -> str | None:
        """A plan to try now, if one is due: unknown ones first, then plain, the longest unused."""
        if self._num_actions - self._last_trial < MIN_INTERVAL:
            return None
        unknown = [plan for plan in self._plans if plan not in prices]
        if unknown:
            return unknown[0]
        rested = {
            plan: self._num_actions - self._last_used[plan, size]
            for plan in prices
            if plan != best
            and (
                plan == PLAIN.name or self._price(plan, size, 1, length) < _HOPELESS * prices[best]
            )
        }
        num_others = len(rested.keys() - {PLAIN.name})
        due = [
            plan
            for plan, rest in rested.items()
            if rest >= MIN_INTERVAL
            and (
                self._is_hardly_known(plan, size)
                or self._is_affordable(plan, rest, prices[plan], prices[best], num_others)
            )
        ]
        if PLAIN.name in due:
            return PLAIN.name
        return max(due, key=lambda plan: rested[plan], default=None)

    def _is_hardly_known(self, plan: str, size: int) -> bool:
        """Whether a price is not worth believing, as after warming up beside other work."""
        if plan == PLAIN.name:
            return self._num_samples[plan, size] < _SAMPLES_BELIEVED
        return plan not in self._usual

    def _is_affordable(
        self, plan: str, rest: int, price: float, best: float, num_others: int
    ) -> bool:
        """Whether trying a plan after so many actions without it stays within its share.

        Plain decoding has half of the share, the others have equal parts of the rest.
        """
        part = EXPLORE_SHARE / 2 / (1 if plan == PLAIN.name else num_others)
        return price - best <= rest * part * best


def _size(num_rows: int) -> int:
    """Batches of about the same size cost about the same: 1, 2, up to 4, up to 8..."""
    return (num_rows - 1).bit_length()
