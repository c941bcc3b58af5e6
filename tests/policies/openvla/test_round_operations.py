"""What a round costs the host outside of recordings. That it reads once: see `test_device_path`."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from deft_client.types import ActOptions, Observation
from deft_policies.base import ActRequest
from deft_policies.decoding.methods import METHODS
from deft_policies.memory import SessionMemory
from deft_policies.model.graphs import CapturedRunner
from deft_policies.model.layout import FixedMemory, Step, Tensors
from deft_policies.openvla.policy import OpenVLAPolicy
from tests.launches import LaunchCounter
from tests.policies.openvla.test_captured_serving import RESERVE, policy_on
from tests.recorder import RecordingCapturer

MOST_PER_ROUND = 12  # the launch of the recording and the read of what it says among them
MOST_BESIDE_ROUNDS = 200  # a frame's own: its inputs, the guesses that ride, judging the prefill
# Sources that keep something of their own between rounds, or draw: no recording repeats that.
STEP_BY_STEP = {"ratio-test", "token-recycling", "small-model", "specvlm"}
# Of a guarded method the guard chooses the plan; others have the same plans without it.
RECORDED = [
    one.name
    for one in METHODS
    if one.plans[0].rounds and not one.is_guarded and one.name not in STEP_BY_STEP
]


class UncountedRunner(CapturedRunner):
    """What captured steps do is not counted, but copying their inputs is."""

    counter: LaunchCounter | None = None

    def __init__(self) -> None:
        super().__init__(RecordingCapturer(), replace(RESERVE, rows=1))
        self.before_rounds: list[int] = []  # operations counted before each recorded round

    def run(self, key: Hashable, step: Step, inputs: Tensors) -> Tensors:
        if self.counter is None:
            return super().run(key, step, inputs)
        if isinstance(key, tuple) and isinstance(key[0], FixedMemory):
            self.before_rounds.append(self.counter.total)
        before = Counter(self.counter.counts)
        outputs = super().run(key, step, inputs)
        before["copies of inputs"] += len({one.dtype for one in inputs})
        self.counter.counts = before
        return outputs


@pytest.fixture(scope="module")
def runner() -> UncountedRunner:
    return UncountedRunner()


@pytest.fixture(scope="module")
def policy(runner: UncountedRunner) -> OpenVLAPolicy:
    policy = policy_on(runner)
    policy.warm_up()
    return policy


def count_rounds(
    runner: UncountedRunner, policy: OpenVLAPolicy, method: str
) -> tuple[list[int], int]:
    """Serve three frames of a session; operations counted in each round, and recorded rounds."""
    options, memory = ActOptions(decoding=method, statistics_key="first"), SessionMemory()
    numbers, per_round, num_recorded = np.random.default_rng(0), list[int](), 0
    for _ in range(3):
        frame = Observation(numbers.integers(0, 256, (28, 28, 3), dtype=np.uint8), "lift it")
        runner.before_rounds.clear()
        with LaunchCounter() as counter:
            runner.counter = counter
            answer = policy.act([ActRequest(frame, memory, options)])[0]
        runner.counter, memory, trace = None, answer.memory, answer.chunk.trace
        assert trace is not None
        counted = runner.before_rounds
        assert len(counted) in (0, trace.num_passes - 1)
        per_round += [after - before for before, after in pairwise(counted)]
        num_recorded += len(counted)
        assert method in STEP_BY_STEP or counter.total <= MOST_BESIDE_ROUNDS + sum(per_round)
    return per_round, num_recorded


@pytest.mark.parametrize("method", RECORDED)
def test_a_round_is_one_launch_and_next_to_nothing_beside_it(
    runner: UncountedRunner, policy: OpenVLAPolicy, method: str
) -> None:
    per_round, num_recorded = count_rounds(runner, policy, method)
    assert num_recorded > 0
    assert per_round
    assert all(number + 2 <= MOST_PER_ROUND for number in per_round)


def test_rounds_of_a_source_that_remembers_for_itself_run_step_by_step(
    runner: UncountedRunner, policy: OpenVLAPolicy
) -> None:
    assert count_rounds(runner, policy, "token-recycling") == ([], 0)
