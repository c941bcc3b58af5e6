"""Methods that answer the same frames in turn, and what is told of them."""

from dataclasses import replace

import numpy as np

from deft_core.types import ActionChunk, DecodeTrace, PassTrace, StageTimings
from deft_libero.evaluation.episode import EpisodePlayer
from deft_libero.evaluation.runs import RunConfig
from scripts.demo import InterleavedPolicy, conclude, describe
from tests.standins.environments import CountingEnvironment, EchoPolicy


def chunk(value: float, num_passes: int, round_trip_ms: float) -> ActionChunk:
    one = PassTrace(True, (0,), (-1,), ("",), (1,), (), 1)
    trace = DecodeTrace("x", (1,), (1,), (1.0,), (one,) * num_passes)
    timings = StageTimings(round_trip_ms=round_trip_ms)
    return ActionChunk(np.full((1, 7), value), timings, trace)


def test_every_method_sees_every_frame_and_the_first_one_acts() -> None:
    environment, policies = CountingEnvironment(), {"a": EchoPolicy(), "b": EchoPolicy(2)}
    policy = InterleavedPolicy(policies)
    EpisodePlayer(environment, policy, RunConfig("s", step_limit=5)).play(3, "s")
    assert [one.sessions for one in policies.values()] == [["s-a"], ["s-b"]]
    frames = [[int(seen.image[0, 0, 0]) for seen in one.seen] for one in policies.values()]
    assert frames[0] == frames[1]
    assert len(frames[0]) == 5
    assert [len(one.actions) for one in policy.answers["a"]] == [1] * 5
    assert [len(one.actions) for one in policy.answers["b"]] == [2] * 5


def test_who_is_asked_first_changes_from_frame_to_frame() -> None:
    asked: list[str] = []

    class Noting(EchoPolicy):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def act(self, observation):  # type: ignore[no-untyped-def]
            asked.append(self.name)
            return super().act(observation)

    policy = InterleavedPolicy({name: Noting(name) for name in "abc"})
    EpisodePlayer(CountingEnvironment(), policy, RunConfig("s", step_limit=3)).play(0, "s")
    assert asked == list("abcbcacab")


def episodes(**methods: ActionChunk) -> list[dict[str, list[ActionChunk]]]:
    return [{name: [chunk] * 10 for name, chunk in methods.items()} for _ in range(5)]


def test_a_ratio_is_one_of_sums_over_the_same_frames_with_its_interval() -> None:
    found = episodes(plain=chunk(0.0, 7, 40.0), fast=chunk(0.0, 3, 25.0))
    found[0]["fast"] = [chunk(0.0, 3, 50.0)] * 10
    text = describe(found)
    assert "| plain  |         40.0 |   7.00 | all answers |" in text
    assert "| fast   |         30.0 |   3.00 | all answers |" in text
    said = conclude(found)
    assert said.startswith("- fast answers 1.33 times as fast as plain (95%: ")
    assert said.endswith("As plain: all answers.\n")


def test_actions_that_differ_are_counted_with_the_largest_difference() -> None:
    found = episodes(plain=chunk(0.0, 7, 40.0), deft=chunk(0.0, 2, 30.0))
    found[0]["deft"][:5] = [chunk(0.02, 2, 30.0)] * 5
    assert "90% of the answers, actions of others by at most 0.020" in describe(found)


def test_answers_are_the_same_where_their_texts_are() -> None:
    found = episodes(plain=chunk(0.0, 7, 40.0), fast=chunk(0.0, 3, 20.0))
    found[1]["fast"] = [replace(one, reasoning="something else") for one in found[1]["fast"]]
    assert "80% of the answers, actions of others by at most 0.000" in describe(found)


def test_no_ratio_is_told_on_a_busy_machine_or_of_few_episodes() -> None:
    found = episodes(plain=chunk(0.0, 7, 40.0), fast=chunk(0.0, 3, 20.0))
    busy = ["the machine was busy"]
    assert "does not allow a conclusion: the machine was busy." in conclude(found, busy)
    assert "20.0" not in describe(found, busy)
    assert "times of 2 episodes, 5 are needed" in conclude(found[:2])
