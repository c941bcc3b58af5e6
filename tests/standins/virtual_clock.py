"""A clock in which nobody waits: time leaps to where the next thread goes on.

One thread runs at a time. Where it waits, sleeps or ends, the next one goes on: one that can, else
the one whose time comes first, and the clock leaps there. So the same threads always do the same.
With a seed, threads also give way where they read the clock or take a lock, and the one that goes
on is drawn: other orders, the same again for the same seed.
"""

import math
import random
import threading
from collections.abc import Callable

from deft_client.control_loop import Clock

NEVER = math.inf
BEGINNING_S = 1000.0
GIVES_WAY_SHARE = 0.3  # of the places where a thread may


class Parked:
    """A thread that waits for its turn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turn = threading.Semaphore(0)
        self.is_able: Callable[[], bool] = lambda: True
        self.until = NEVER


class VirtualClock(Clock):
    """Time and threads of a loop, of its policy and of its arm: they `sleep` here."""

    def __init__(self, seed: int | None = None, jump_share: float = 0.0, jump_s: float = 0.0):
        """At `jump_share` of the leaps, up to `jump_s` more pass: the process was stopped."""
        self.now = BEGINNING_S
        self.jumps: list[float] = []  # when each began
        self._random = None if seed is None else random.Random(seed)
        self._jump_share, self._jump_s = jump_share, jump_s
        self._parked: list[Parked] = []  # who does not run, in the order of waiting
        self._mine = threading.local()
        self._num_alive = 0
        self._main = Parked("main")
        self._deadlock = ""

    def run(self, work: Callable[[], None]) -> None:
        """Do something in this thread, and return when all threads that it started have ended."""
        self._mine.self = self._main
        self._num_alive += 1
        try:
            work()
        finally:
            self._park(lambda: self._num_alive == 1, NEVER)
            self._num_alive -= 1

    def monotonic(self) -> float:
        self.give_way()
        return self.now

    def condition(self) -> "VirtualCondition":  # type: ignore[override]
        return VirtualCondition(self)

    def start(self, work: Callable[[], None], name: str) -> None:
        own = Parked(name)

        def run() -> None:
            own.turn.acquire()
            self._mine.self = own
            try:
                work()
            finally:
                self._num_alive -= 1
                self._go_on()

        self._num_alive += 1
        self._parked.append(own)
        threading.Thread(target=run, name=name, daemon=True).start()

    def sleep(self, seconds: float) -> None:
        """Go on later."""
        self._park(lambda: False, self.now + seconds)

    def wait_for(self, is_able: Callable[[], bool], until: float = NEVER) -> bool:
        """Go on when something holds, or at a moment; tell whether it holds."""
        self._park(is_able, until)
        return is_able()

    def give_way(self) -> None:
        """Let another thread go on, now and then, where there is a seed."""
        if self._random is not None and self._random.random() < GIVES_WAY_SHARE:
            self._park(lambda: True, NEVER)

    def _park(self, is_able: Callable[[], bool], until: float) -> None:
        own: Parked = self._mine.self
        own.is_able, own.until = is_able, until
        self._parked.append(own)
        self._go_on()
        own.turn.acquire()
        assert not self._deadlock, self._deadlock

    def _go_on(self) -> None:
        """Give the turn to another thread, or to this one again."""
        if not self._parked:
            return
        able = [one for one in self._parked if one.is_able() or one.until <= self.now]
        if not able:
            moment = min(one.until for one in self._parked)
            if moment == NEVER:
                self._deadlock = f"all wait for ever: {[one.name for one in self._parked]}"
                able = [self._main]  # says so
            else:
                self._leap(moment)
                able = [one for one in self._parked if one.until <= self.now]
        chosen = able[0] if self._random is None else self._random.choice(able)
        self._parked.remove(chosen)
        chosen.turn.release()

    def _leap(self, moment: float) -> None:
        if self._random is not None and self._random.random() < self._jump_share:
            self.jumps.append(self.now)
            moment += self._random.random() * self._jump_s
        self.now = moment


class VirtualCondition:
    """As `threading.Condition`: who was not notified does not look again."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._owner: object = None
        self._depth = 0
        self._waiting: list[threading.Event] = []

    def __enter__(self) -> "VirtualCondition":
        own = threading.get_ident()
        if self._owner != own:
            self._clock.give_way()
            while self._owner is not None:
                self._clock.wait_for(lambda: self._owner is None)
            self._owner = own
        self._depth += 1
        return self

    def __exit__(self, *failure: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None

    def wait_for(self, is_able: Callable[[], bool], timeout: float | None = None) -> bool:
        assert self._owner == threading.get_ident()
        until = NEVER if timeout is None else self._clock.now + timeout
        while not is_able():
            if self._clock.now >= until:
                return False
            notified, depth = threading.Event(), self._depth
            self._waiting.append(notified)
            self._owner, self._depth = None, 0
            self._clock.wait_for(notified.is_set, until)
            while self._owner is not None:
                self._clock.wait_for(lambda: self._owner is None)
            self._owner, self._depth = threading.get_ident(), depth
            if notified in self._waiting:
                self._waiting.remove(notified)
        return True

    def notify_all(self) -> None:
        assert self._owner == threading.get_ident()
        for one in self._waiting:
            one.set()
        self._waiting.clear()
