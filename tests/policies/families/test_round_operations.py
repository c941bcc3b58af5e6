"""What a round costs the host outside of recordings."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from deft_client.types import ActOptions, Observation
from deft_policies.base import ActRequest
from deft_policies.families.policy import VlaPolicy
from deft_policies.memory import SessionMemory
from tests.launches import LaunchCounter, UncountedRunner
from tests.policies.decoding.scripts import METHODS
from tests.policies.families.test_captured_serving import RESERVE, policy_on

MOST_PER_ROUND = 12  # the launch of the recording and the read of what it says among them
MOST_BESIDE_ROUNDS = 200  # a frame's own: its inputs, the guesses that ride, judging the prefill
NOT_THERE = {"small-model", "specvlm"}  # this policy has no small model
# Of a guarded method the guard chooses the plan; others have the same plans without it.
RECORDED = [
    one.name
    for one in METHODS
    if one.plans[0].rounds and not one.is_guarded and one.name not in NOT_THERE
]


@pytest.fixture(scope="module")
def runner() -> UncountedRunner:
    return UncountedRunner(replace(RESERVE, rows=1))


@pytest.fixture(scope="module")
def policy(runner: UncountedRunner) -> VlaPolicy:
    policy = policy_on(runner)
    policy.warm_up()
    return policy


def count_rounds(runner: UncountedRunner, policy: VlaPolicy, method: str) -> tuple[list[int], int]:
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
        assert counter.total <= MOST_BESIDE_ROUNDS + sum(per_round)
    return per_round, num_recorded


@pytest.mark.long(seconds=19)
@pytest.mark.parametrize("method", RECORDED)
def test_a_round_is_one_launch_and_next_to_nothing_beside_it(
    runner: UncountedRunner, policy: VlaPolicy, method: str
) -> None:
    per_round, num_recorded = count_rounds(runner, policy, method)
    assert num_recorded > 0
    assert per_round
    assert all(number + 2 <= MOST_PER_ROUND for number in per_round)
