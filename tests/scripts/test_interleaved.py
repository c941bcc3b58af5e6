"""Methods that answer the same frames in turn, and what is told of them."""

from dataclasses import replace

import numpy as np
import pytest

from deft_client.libero.evaluation.episode import EpisodePlayer
from deft_client.libero.evaluation.runs import RunConfig
from deft_client.types import ActionChunk, DecodeTrace, PassTrace, StageTimings
from scripts.interleaved import (
    InterleavedPolicy,
    compare_methods,
    speed_table,
)
from tests.standins.environments import CountingEnvironment, EchoPolicy


def chunk(value: float, num_passes: int, round_trip_ms: float, verify_ms: float) -> ActionChunk:
    one = PassTrace(True, (0,), (-1,), ("",), (1,), (), 1)
    trace = DecodeTrace("x", (1,), (1,), (1.0,), (one,) * num_passes)
    timings = StageTimings(verify_ms=verify_ms, round_trip_ms=round_trip_ms)
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


def test_ratios_are_medians_over_runs_so_that_a_busy_moment_does_not_count() -> None:
    plain = [chunk(0.0, 7, 40.0, 20.0) for _ in range(50)]
    fast = [chunk(0.0, 3, 25.0, 5.0) for _ in range(50)]
    fast[7] = replace(fast[7], timings=StageTimings(verify_ms=5.0, round_trip_ms=5000.0))
    first, second = compare_methods({"autoregressive": plain, "lossless": fast})
    assert (first.times_faster, first.predicted) == (1.0, 1.0)
    assert first.actions_per_s == pytest.approx(25)
    assert second.times_faster == pytest.approx(1.6)
    assert second.identical_actions == 1.0


def test_the_formula_shortens_what_lies_behind_the_prefill_alone() -> None:
    plain = [chunk(0.0, 7, 40.0, 30.0) for _ in range(5)]  # three quarters behind the prefill
    drafted = [chunk(0.0, 3, 30.0, 20.0) for _ in range(5)]
    _, second = compare_methods({"plain": plain, "drafted": drafted})
    assert second.predicted == pytest.approx(1 / (1 / 4 + 3 / 4 * 2 / 6))
    assert second.passes == 3


def test_the_table_tells_identical_actions_from_those_that_differ() -> None:
    plain = [chunk(0.0, 7, 40.0, 20.0) for _ in range(10)]
    same = [chunk(0.0, 3, 30.0, 10.0) for _ in range(10)]
    near = [*same[:9], chunk(0.02, 2, 30.0, 10.0)]
    text = speed_table(compare_methods({"autoregressive": plain, "lossless": same, "deft": near}))
    head, _, lossless, deft, share = text.splitlines()
    assert head.split() == [
        "method", "actions/s", "faster", "by", "formula", "passes", "identical"
    ]  # fmt: skip
    assert lossless.split() == ["lossless", "33.3", "1.33x", "1.50x", "3.00", "all", "actions"]
    assert "90%, others by at most 0.020" in deft
    assert share.startswith("50% of autoregressive's time")
