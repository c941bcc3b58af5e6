import random
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from deft_client.errors import NoActionError
from deft_core.errors import Problem
from deft_core.measures.answers import AnswerRecord
from deft_core.types import ActionChunk, ChunkBlending, Observation, StageTimings
from deft_libero.evaluation.episode import EpisodeLog, EpisodePlayer
from deft_libero.evaluation.runs import RunConfig, VideoChoice
from deft_libero.policies.source import PROFILES, PolicySource
from tests.standins.environments import CountingEnvironment, EchoPolicy, trace_of


def _config(executed_steps: int | None = None, **changes: object) -> RunConfig:
    profile = replace(PROFILES["deft"], executed_steps=executed_steps)
    return RunConfig("s", PolicySource(profile=profile), step_limit=5, **changes)  # type: ignore[arg-type]


def _play(
    environment: CountingEnvironment, policy: EchoPolicy, config: RunConfig | None = None
) -> EpisodeLog:
    return EpisodePlayer(environment, policy, config or _config()).play(41, "s")


def _first_numbers(actions: list[NDArray[np.float64]]) -> list[float]:
    return [float(action[0]) for action in actions]


def test_ten_wait_steps_come_before_the_first_observation() -> None:
    environment, policy = CountingEnvironment(), EchoPolicy()
    _play(environment, policy)
    assert environment.trials == [41]
    for action in environment.actions[:10]:
        assert action.tolist() == [0, 0, 0, 0, 0, 0, -1]
    assert policy.seen[0].image[0, 0, 0] == 10
    assert policy.seen[0].instruction == "pick up the soup"


def test_the_session_is_reset_once_at_the_start() -> None:
    policy = EchoPolicy()
    _play(CountingEnvironment(), policy)
    assert policy.sessions == ["s"]


def test_every_observation_is_the_frame_after_the_last_action() -> None:
    log = _play(CountingEnvironment(), EchoPolicy())
    assert _first_numbers(log.actions) == [10, 11, 12, 13, 14]


def test_an_episode_fails_when_its_steps_are_used_up() -> None:
    log = _play(CountingEnvironment(done_at=16), EchoPolicy())
    assert (log.has_succeeded, len(log.actions)) == (False, 5)


def test_an_episode_succeeds_at_the_step_whose_goal_holds_even_the_last() -> None:
    log = _play(CountingEnvironment(done_at=15), EchoPolicy())
    assert (log.has_succeeded, len(log.actions)) == (True, 5)
    assert len(_play(CountingEnvironment(done_at=13), EchoPolicy()).actions) == 3


def test_a_goal_that_holds_during_the_wait_is_not_the_policys_doing() -> None:
    log = _play(CountingEnvironment(done_at=5), EchoPolicy())
    assert (log.has_succeeded, len(log.actions)) == (True, 1)


def test_a_chunk_is_executed_to_its_end_before_the_next_observation() -> None:
    log = _play(CountingEnvironment(), EchoPolicy(chunk_length=3))
    assert _first_numbers(log.actions) == [10, 10, 10, 13, 13]
    assert [one.asked_step for one in log.answers] == [0, 3]


def test_a_part_of_a_chunk_is_executed_where_the_profile_says_so() -> None:
    log = _play(CountingEnvironment(), EchoPolicy(chunk_length=8), _config(executed_steps=2))
    assert _first_numbers(log.actions) == [10, 10, 12, 12, 14]


def test_an_ensemble_asks_at_every_step_and_averages_what_was_answered() -> None:
    source = PolicySource(profile=PROFILES["vla0"])
    config = replace(_config(), blending=ChunkBlending.ENSEMBLE, source=source, step_limit=3)
    log = _play(CountingEnvironment(), EchoPolicy(chunk_length=8), config)
    assert len(log.answers) == len(log.actions) == 3
    plain = _play(CountingEnvironment(), EchoPolicy(chunk_length=8), _config(executed_steps=1))
    first, second = (one[0] for one in plain.actions[:2])
    assert log.actions[0][0] == first
    assert first <= log.actions[1][0] != second


def test_latency_passes_and_accepted_lengths_are_kept_for_every_answer() -> None:
    log = _play(CountingEnvironment(), EchoPolicy(trace=trace_of((3, 1, 0), relaxed=2)))
    timings = StageTimings(total_ms=5.0, round_trip_ms=6.0)
    assert log.answers[4] == AnswerRecord(
        4, 4, timings, (3, 1, 0), 7, 2, "lossless", guesses=(3, 1, 0)
    )


def test_global_generators_are_seeded_anew_for_every_episode() -> None:
    draws = []
    for _ in range(2):
        _play(CountingEnvironment(), EchoPolicy())
        draws.append((random.random(), float(np.random.random())))
        random.random()
    assert draws[0] == draws[1]


def test_images_are_kept_only_when_asked_for() -> None:
    assert _play(CountingEnvironment(), EchoPolicy()).images == []
    log = _play(CountingEnvironment(), EchoPolicy(), _config(video=VideoChoice.FAILURES))
    shown = [int(image[0, 0, 0]) for image in log.images]
    assert shown == [10, 11, 12, 13, 14, 15]  # and the last one


def test_the_arm_holds_for_a_step_where_a_text_has_no_action() -> None:
    """It is asked again with the next frame."""

    class Ponderer(EchoPolicy):
        def act(self, observation: Observation) -> ActionChunk:
            chunk = super().act(observation)
            if len(self.seen) in (1, 3):
                raise NoActionError(Problem(500, "No action in the answer", reasoning="why?"))
            return chunk

    log = _play(CountingEnvironment(), Ponderer())
    assert [one.asked_step for one in log.answers] == [1, 3, 4]
    assert log.actions[0].tolist() == [0, 0, 0, 0, 0, 0, -1]
    assert (len(log.actions), log.held_steps) == (5, 1)
    held = log.actions[2]
    assert not held[:6].any()
    assert held[6] == log.actions[1][6]
