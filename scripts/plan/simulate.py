"""Runs the server's own queue against robots that do not exist, faster than time passes.

What decides is `serving.queue` itself; invented are only the robots, who send at a fixed
rate whatever they are answered, and the policy, whose times are drawn from recorded ones.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deft_client.types import ActOptions, Observation
from deft_server.errors import DeadlineError, OverloadedError
from deft_server.serving.queue import FrameQueue, QueueRules
from deft_server.serving.request import Request
from deft_server.serving.sessions import RobotSession
from scripts.plan.service_times import QUANTILE_STEPS, ServiceTimes

_ROUGHLY = 0.9  # a drawn fleet may be lucky


@dataclass(frozen=True)
class Fleet:
    """Robots that send frames at a fixed rate, each at a random moment of its period."""

    num_robots: int
    rate_hz: float
    deadline_s: float = math.inf
    jitter: float = 0.1  # of a period: how far a frame may be early or late
    seconds: float = 20.0
    warm_up_s: float = 2.0  # what is sent before this is not counted
    seed: int = 0


@dataclass(frozen=True)
class Capacity:
    """Who answers: one front that takes `front_s` of its only core per frame, and replicas.

    `added_s` is what else a frame spends on its way there and back, without keeping anybody busy.
    """

    service: ServiceTimes
    rules: QueueRules
    front_s: float = 0.0
    added_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Forecast:
    """What became of the frames, and how busy the policy and the front were."""

    num_sent: int
    latencies_s: NDArray[np.float64]  # [answered frame], from being sent to being answered
    num_superseded: int
    num_refused: int  # too many waiting
    num_missed: int  # could not, or did not, meet the deadline
    mean_batch: float
    replica_load: float  # share of the time, 0 to 1
    front_load: float  # above 1 the front cannot keep up, and latency grows without end

    def at(self, quantile: float) -> float:
        """Return the seconds that this share of the answers stays within; infinite without any."""
        return float(np.quantile(self.latencies_s, quantile)) if self.num_answered else math.inf

    @property
    def num_answered(self) -> int:
        """Frames that were answered in time."""
        return len(self.latencies_s)

    @property
    def answered_share(self) -> float:
        """Of the frames that were sent."""
        return self.num_answered / max(1, self.num_sent)


class _Flight(NamedTuple):
    """A batch that is with a replica."""

    lands_s: float
    number: int
    started_s: float
    frames: list[Request]


class Simulation:
    """One run; `simulate` makes, runs and forgets it."""

    def __init__(self, fleet: Fleet, capacity: Capacity) -> None:
        self._fleet = fleet
        self._capacity = capacity
        self._queue = FrameQueue(capacity.rules)
        self._random = np.random.default_rng(fleet.seed)
        evenly = np.linspace(0, 1, QUANTILE_STEPS)
        self._quantiles_s = [
            capacity.service.all_at(size, evenly).tolist()
            for size in range(1, capacity.rules.max_batch + 1)
        ]
        self._flights: list[_Flight] = []  # a heap: the first to land comes first
        self._front_busy_s = 0.0
        self._replica_busy_s = 0.0
        self._fates: Counter[str] = Counter()
        self._latencies_s: list[float] = []
        self._batches: list[int] = []

    def run(self) -> Forecast:
        """Play the whole time and sum up."""
        for frame, joins_s in self._frames():
            self._go_on_until(joins_s)
            self._join(frame, joins_s)
        self._go_on_until(math.inf)
        fleet = self._fleet
        return Forecast(
            num_sent=self._fates["sent"],
            latencies_s=np.array(self._latencies_s),
            num_superseded=self._fates["superseded"],
            num_refused=self._fates["refused"],
            num_missed=self._fates["missed"],
            mean_batch=float(np.mean(self._batches)) if self._batches else 0.0,
            replica_load=self._replica_busy_s
            / (fleet.seconds * self._queue.admission.num_replicas),
            front_load=self._front_busy_s / fleet.seconds,
        )

    def _frames(self) -> Iterator[tuple[Request, float]]:
        """Return all frames, and when the front is through with each and it joins the line."""
        fleet, front_s = self._fleet, self._capacity.front_s
        sent_s = self._sent_s()
        order = np.argsort(sent_s, axis=None, kind="stable")
        sessions = [RobotSession("", f"robot {one}", 0.0) for one in range(fleet.num_robots)]
        seen, options = Observation(np.zeros((1, 1, 3), np.uint8), "lift the cup"), ActOptions()
        front_free_s = 0.0
        for index in order.tolist():
            at_s, session = float(sent_s.flat[index]), sessions[index // sent_s.shape[1]]
            self._count("sent", at_s)
            front_free_s = max(front_free_s, at_s) + front_s
            self._front_busy_s += front_s
            deadline_s = at_s + fleet.deadline_s
            frame = Request(seen, options, session, at_s, deadline_s, session.flow)
            yield frame, front_free_s

    def _sent_s(self) -> NDArray[np.float64]:  # [robot, beat]
        """Return when the frames are sent: every period, a little early or late."""
        fleet, period_s = self._fleet, 1 / self._fleet.rate_hz
        num_beats = int(fleet.seconds * fleet.rate_hz)
        drawn = self._random.random((fleet.num_robots, 1 + num_beats))
        phases_s = drawn[:, :1] / fleet.rate_hz
        late_s = fleet.jitter * period_s * (drawn[:, 1:] - 0.5)
        return np.maximum(0.0, phases_s + np.arange(num_beats) * period_s + late_s)

    def _go_on_until(self, then_s: float) -> None:
        """Let batches return, and others start, up to a moment."""
        while self._flights and self._flights[0].lands_s < then_s:
            flight = heapq.heappop(self._flights)
            self._finish(flight)
            self._start_batches(flight.lands_s)

    def _join(self, frame: Request, now_s: float) -> None:
        try:
            superseded = self._queue.offer(frame, now_s)
        except DeadlineError:
            self._count("missed", frame.arrived_s)
        except OverloadedError:
            self._count("refused", frame.arrived_s)
        else:
            if superseded is not None:
                self._count("superseded", superseded.arrived_s)
        self._start_batches(now_s)

    def _start_batches(self, now_s: float) -> None:
        """Start what is to go, as the scheduler does."""
        while True:
            chosen, expired = self._queue.next_batch(now_s)
            for frame in expired:
                self._count("missed", frame.arrived_s)
            if not chosen:
                return
            self._start(chosen, now_s)

    def _start(self, frames: list[Request], now_s: float) -> None:
        size = len(frames)
        service_s = self._quantiles_s[size - 1][self._random.integers(QUANTILE_STEPS)]
        self._replica_busy_s += max(0.0, min(service_s, self._fleet.seconds - now_s))
        self._batches.append(size)
        heapq.heappush(self._flights, _Flight(now_s + service_s, len(self._batches), now_s, frames))

    def _finish(self, flight: _Flight) -> None:
        now_s = flight.lands_s
        for frame in flight.frames:
            self._queue.admission.finish(frame, now_s, now_s - flight.started_s)
            latency_s = now_s + self._capacity.added_s - frame.arrived_s
            if now_s > frame.deadline_s:
                self._count("missed", frame.arrived_s)
            elif frame.arrived_s >= self._fleet.warm_up_s:
                self._latencies_s.append(latency_s)

    def _count(self, fate: str, sent_s: float) -> None:
        self._fates[fate] += sent_s >= self._fleet.warm_up_s


def simulate(fleet: Fleet, capacity: Capacity) -> Forecast:
    """Return what would become of a fleet's frames."""
    return Simulation(fleet, capacity).run()


@dataclass(frozen=True)
class FleetGoal:
    """What has to hold: a quantile of the answers' times, and the share that is answered."""

    p99_s: float
    answered_share: float = 0.999

    def is_met(self, forecast: Forecast) -> bool:
        """Does a forecast reach it?"""
        return (
            forecast.at(0.99) <= self.p99_s
            and forecast.answered_share >= self.answered_share
            and forecast.front_load < 1
        )


@dataclass(frozen=True)
class Search:
    """The fewest replicas that meet a goal, None where none do, and every forecast on the way."""

    num_replicas: int | None
    forecasts: dict[int, Forecast] = field(default_factory=dict)


def fewest_replicas(fleet: Fleet, capacity: Capacity, goal: FleetGoal, most: int) -> Search:
    """Find how many replicas a fleet needs, from the least that could ever answer so many frames:
    in growing steps until it holds, then narrowed down."""
    seen: dict[int, Forecast] = {}

    def holds(count: int) -> bool:
        rules = replace(capacity.rules, num_replicas=count)
        seen[count] = simulate(fleet, replace(capacity, rules=rules))
        return goal.is_met(seen[count])

    wanted_per_s = goal.answered_share * fleet.num_robots * fleet.rate_hz
    least = wanted_per_s / capacity.service.most_per_s(capacity.rules.max_batch)
    enough = too_few = max(0, min(most, math.floor(least * _ROUGHLY)) - 1)
    step = 1
    while enough == too_few or not holds(enough):
        if enough >= most:
            return Search(None, seen)
        too_few, enough, step = enough, min(most, enough + step), 2 * step
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if holds(middle):
            enough = middle
        else:
            too_few = middle
    return Search(enough, seen)
