import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest

from deft_client.errors import ServerUnreachableError
from deft_core.types import ActionChunk, ChunkBlending, Observation
from deft_libero.evaluation.episode import BackgroundCalls, Clock, EpisodeLog, EpisodePlayer
from deft_libero.evaluation.runs import Pacing, RunConfig
from deft_libero.policies.source import PROFILES, PolicySource
from tests.standins.environments import (
    TASK,
    CountingEnvironment,
    EchoPolicy,
    FakeClock,
    ScriptedCalls,
    SlowEnvironment,
    echo,
)

WAITING = 0.0  # first number of the wait action, and of a hold


@dataclass
class Played:
    log: EpisodeLog
    clock: FakeClock
    calls: ScriptedCalls

    @property
    def executed(self) -> list[float]:
        """Frames that the executed actions answer; WAITING where the arm holds."""
        return [float(action[0]) for action in self.log.actions]


def _play(
    latencies_s: list[float],
    step_limit: int = 6,
    chunk_length: int = 1,
    step_s: float = 0.0,
    executed_steps: int | None = None,
) -> Played:
    clock = FakeClock()
    calls = ScriptedCalls(clock, latencies_s, chunk_length)
    environment = SlowEnvironment(clock, step_s)
    source = PolicySource(profile=replace(PROFILES["deft"], executed_steps=executed_steps))
    config = RunConfig(
        "s", source, pacing=Pacing.REAL_TIME, blending=ChunkBlending.SWITCH, step_limit=step_limit
    )
    log = EpisodePlayer(environment, EchoPolicy(), config).play(0, "s", clock, calls)
    return Played(log, clock, calls)


def test_the_simulator_makes_twenty_steps_a_second() -> None:
    for latency_s in (0.0, 0.03, 10.0):
        played = _play([latency_s], step_limit=20)
        assert played.clock.seconds - 100.0 == pytest.approx(1.0)


def test_an_answer_within_the_period_acts_one_step_later() -> None:
    played = _play([0.04])
    assert played.executed == [WAITING, 10, 11, 12, 13, 14]
    assert played.log.held_steps == 0
    assert [(one.asked_step, one.used_step) for one in played.log.answers[:2]] == [(0, 1), (1, 2)]


def test_the_arm_holds_until_a_slow_answer_comes() -> None:
    played = _play([0.12], step_limit=9)
    assert played.executed == [*[WAITING] * 3, 10, WAITING, WAITING, 13, WAITING, WAITING]
    assert played.log.held_steps == 6
    assert played.calls.sent == [10, 13, 16]


def test_without_any_answer_the_robot_waits_with_an_open_gripper() -> None:
    played = _play([60.0])
    assert all(action.tolist() == [0, 0, 0, 0, 0, 0, -1] for action in played.log.actions)
    assert played.log.answers == []


def test_one_slow_answer_among_fast_ones_costs_only_its_own_steps() -> None:
    played = _play([0.01, 0.01, 0.14, 0.01], step_limit=8)
    assert played.executed == [WAITING, 10, 11, WAITING, WAITING, 12, 15, 16]


def test_an_answer_exactly_on_the_beat_is_in_time() -> None:
    assert _play([0.15], step_limit=5).executed == [WAITING, WAITING, WAITING, 10, WAITING]


def test_chunks_act_at_the_steps_they_were_meant_for() -> None:
    """The first action of a chunk is for the step of its frame, which is over when it comes; but
    the robot stood still while the first chunk was awaited."""
    played = _play([0.04], chunk_length=4, step_limit=9)
    steps = [int(action[1]) for action in played.log.actions]
    assert steps == [0, 0, 1, 2, 3, 1, 2, 3, 1]
    assert played.executed == [WAITING, 10, 10, 10, 10, 14, 14, 14, 17]
    assert played.log.held_steps == 0


def test_the_arm_holds_where_a_chunk_is_used_up() -> None:
    played = _play([0.04, 0.26], chunk_length=2, step_limit=9)
    assert played.executed == [WAITING, 10, 10, *[WAITING] * 5, 12]
    assert all(action[6] == 0.0 for action in played.log.actions[1:])
    assert played.log.held_steps == 5


def test_a_slow_simulator_neither_hurries_nor_favours_the_policy() -> None:
    """With steps of 0.1 s an answer after 0.12 s still acts three periods later, not two."""
    played = _play([0.12], step_limit=6, step_s=0.1)
    assert played.executed == [WAITING, WAITING, WAITING, 10, WAITING, WAITING]
    assert played.log.late_steps == 6


def test_an_episode_succeeds_while_an_answer_is_still_on_its_way() -> None:
    clock = FakeClock()
    environment, config = (
        CountingEnvironment(done_at=13),
        RunConfig("s", pacing=Pacing.REAL_TIME, step_limit=50),
    )
    log = EpisodePlayer(environment, EchoPolicy(), config).play(
        0, "s", clock, ScriptedCalls(clock, [1.0])
    )
    assert (log.has_succeeded, len(log.actions)) == (True, 3)


class _GatedPolicy(EchoPolicy):
    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def act(self, observation: Observation) -> ActionChunk:
        assert self.gate.wait(timeout=60)
        return echo(observation)


class _BrokenPolicy(EchoPolicy):
    def act(self, observation: Observation) -> ActionChunk:
        raise ServerUnreachableError("gone")


def _observation() -> Observation:
    return Observation(np.zeros((8, 8, 3), dtype=np.uint8), TASK.instruction)


def test_the_thread_delivers_when_the_answer_has_come_and_not_before() -> None:
    policy = _GatedPolicy()
    calls = BackgroundCalls(policy, Clock())
    calls.send(_observation())
    assert calls.collect() is None
    policy.gate.set()
    calls.close()
    delivery = calls.collect()
    assert delivery is not None
    assert delivery[1] > 0
    assert calls.collect() is None


def test_what_breaks_the_policy_in_its_thread_breaks_the_episode() -> None:
    calls = BackgroundCalls(_BrokenPolicy(), Clock())
    calls.send(_observation())
    calls.close()
    with pytest.raises(ServerUnreachableError, match="gone"):
        calls.collect()
