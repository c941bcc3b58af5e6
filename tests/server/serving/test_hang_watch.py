"""A policy that does not come back is noticed; a process that stood still is no such policy."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from deft_server.serving import hang_watch
from deft_server.serving.hang_watch import HangWatch
from deft_server.serving.hosting import PolicyHost

pytestmark = pytest.mark.promise

AFTER_S = 10.0


@dataclass(eq=False)
class Timer:
    """One that the watch has set."""

    due_s: float
    work: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass(eq=False)
class Machine:
    """An event loop, its clock and a policy whose last round ended at `last_round_s`."""

    now_s: float = 100.0
    last_round_s: float | None = 0.0
    timers: list[Timer] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now_s

    def call_later(self, seconds: float, work: Callable[..., None], *given: Any) -> Timer:
        self.timers.append(Timer(self.now_s + seconds, lambda: work(*given)))
        return self.timers[-1]

    def run(self, seconds: float) -> None:
        """Let time pass, with every timer at its moment."""
        until_s = self.now_s + seconds
        while due := [one for one in self.timers if not one.is_cancelled and one.due_s <= until_s]:
            first = min(due, key=lambda one: one.due_s)
            self.timers.remove(first)
            self.now_s = max(self.now_s, first.due_s)
            first.work()
        self.now_s = until_s

    def freeze(self, seconds: float) -> None:
        """Let time pass in which nothing runs; timers that were due are late."""
        self.now_s += seconds
        self.run(0.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(hang_watch, "time", machine)
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: machine)
    return machine


def watching(machine: Machine) -> list[float]:
    """Begin a round now; returns when the policy was said to hang."""
    hangs: list[float] = []
    watch = HangWatch(AFTER_S, lambda: hangs.append(machine.now_s))
    watch.restart(cast(PolicyHost, machine))
    return hangs


def test_a_round_that_does_not_end_is_a_hang(machine: Machine) -> None:
    hangs = watching(machine)
    machine.run(9.9)
    assert hangs == []
    machine.run(0.2)
    assert hangs == [pytest.approx(110.0)]
    machine.run(100.0)
    assert len(hangs) == 1


@pytest.mark.parametrize("frozen_s", [5.0, 9.0, 60.0])
def test_time_in_which_the_process_stood_still_is_not_the_rounds(
    machine: Machine, frozen_s: float
) -> None:
    """A paused container, a moved machine or a debugger once ended the server."""
    hangs = watching(machine)
    machine.run(4.5)
    machine.freeze(frozen_s)
    machine.run(4.0)
    assert hangs == []
    machine.run(3.0)  # it ran for more than ten seconds, without those in which it was frozen
    assert len(hangs) == 1


def test_a_policy_that_hangs_after_a_freeze_is_noticed_all_the_same(machine: Machine) -> None:
    hangs = watching(machine)
    for _ in range(20):
        machine.freeze(30.0)
        machine.run(1.5)
    assert len(hangs) == 1


def test_rounds_that_end_begin_the_time_anew(machine: Machine) -> None:
    hangs = watching(machine)
    for _ in range(5):
        machine.run(8.0)
        machine.last_round_s = machine.now_s
    machine.run(9.9)
    assert hangs == []
    machine.run(0.2)
    assert hangs == [pytest.approx(150.0)]
