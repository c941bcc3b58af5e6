"""A fleet of robots at a queue: time is a number, and what a round costs is a formula."""

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from deft_server.errors import DeadlineError
from deft_server.serving.frame import QueuedFrame
from deft_server.serving.queue import FrameQueue
from tests.server.serving.queued import queued

STARTS_S = 10.0


@dataclass(frozen=True)
class Price:
    """Seconds of a round: for itself, for each frame in it, and for each that joins."""

    round_s: float
    frame_s: float
    join_s: float
    noise: float = 0.1  # the deviation of a round's logarithm


@dataclass(frozen=True)
class Robot:
    """Sends a frame a period, unless the last one is still on its way."""

    name: str
    rate_hz: float = 5.0
    deadline_s: float = math.inf
    num_rounds: int = 3
    owner: str = ""
    is_text: bool = False


class Fleet:
    """Plays robots against the queue of a policy whose frames join and leave between rounds."""

    def __init__(
        self, robots: Sequence[Robot], price: Price, max_batch: int = 8, seed: int = 0
    ) -> None:
        self.queue = FrameQueue(max_batch=max_batch)
        self.queue.admission.joins_midway = True
        self.fates = {one.name: Counter[str]() for one in robots}
        self.most_texts = 0
        self._robots = robots
        self._price = price
        self._chance = random.Random(seed)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, str, object]] = []
        self._sent: dict[str, QueuedFrame] = {}  # what each robot waits for
        self._robot_of: dict[QueuedFrame, Robot] = {}
        self._left: dict[QueuedFrame, int] = {}  # rounds, of those with the policy
        self._joining: list[QueuedFrame] = []
        self._is_playing = False

    def play(self, seconds: float) -> list[int]:
        """Let time pass; returns how many frames of each robot were answered."""
        for robot in self._robots:
            first_s = STARTS_S + self._chance.random() / robot.rate_hz
            self._later(first_s, "is due", robot)
        while self._events:
            now_s, _, what, about = heapq.heappop(self._events)
            if now_s > STARTS_S + seconds:
                break
            if isinstance(about, Robot):
                self._send(about, now_s)
            elif isinstance(about, QueuedFrame):
                self._end(about, "late")
                self.queue.remove(about)
            else:
                self._finish_round(now_s)
            self._start(now_s)
        return [fates["answered"] for fates in self.fates.values()]

    def _later(self, at_s: float, what: str, about: object = None) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), what, about))

    def _send(self, robot: Robot, now_s: float) -> None:
        self._later(now_s + 1 / robot.rate_hz, "is due", robot)
        if robot.name in self._sent:
            return
        frame = queued(
            next(self._numbers),
            robot.name,
            now_s,
            now_s + robot.deadline_s,
            owner=robot.owner,
            is_text=robot.is_text,
        )
        self._robot_of[frame] = robot
        self._sent[robot.name] = frame
        try:
            self.queue.enqueue(frame, now_s)
        except DeadlineError:
            self._end(frame, "refused")
            return
        if frame.has_deadline:
            self._later(frame.deadline_s, "deadline", frame)

    def _end(self, frame: QueuedFrame, fate: str) -> None:
        name = frame.flow
        if self._sent.get(name) is frame:
            del self._sent[name]
            self.fates[name][fate] += 1

    def _start(self, now_s: float) -> None:
        while True:
            chosen, expired = self.queue.next_batch(now_s)
            for frame in expired:
                self._end(frame, "expired")
            if not chosen:
                break
            self._joining += chosen
        if not self._is_playing and (self._joining or self._left):
            self._play_round(now_s)

    def _play_round(self, now_s: float) -> None:
        joined, self._joining = self._joining, []
        for frame in joined:
            self._left[frame] = self._robot_of[frame].num_rounds
        self.most_texts = max(self.most_texts, sum(one.is_text for one in self._left))
        price = self._price
        round_s = price.round_s + price.frame_s * len(self._left) + price.join_s * len(joined)
        self._is_playing = True
        self._later(now_s + round_s * self._chance.lognormvariate(0, price.noise), "round")

    def _finish_round(self, now_s: float) -> None:
        self._is_playing = False
        for frame in list(self._left):
            self._left[frame] -= 1
            is_over = frame.deadline_s <= now_s
            if self._left[frame] and not is_over:
                continue
            del self._left[frame]
            self._end(frame, "late" if is_over else "answered")
            self.queue.admission.finish(frame, now_s, now_s - frame.started_s)
