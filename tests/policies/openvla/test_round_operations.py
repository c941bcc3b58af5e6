"""What a round costs the host outside of recordings. That it reads once: see `test_device_path`."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import pytest

from deft_client.types import ActOptions, Observation
from deft_policies.base import ActRequest
from deft_policies.decoding.methods import METHODS
from deft_policies.model.graphs import CapturedRunner
from deft_policies.model.layout import FixedMemory, Step, Tensors
from deft_policies.openvla.policy import OpenVLAPolicy
from tests.launches import LaunchCounter
from tests.policies.openvla.test_captured_serving import RESERVE, policy_on
from tests.recorder import RecordingCapturer

MOST_PER_ROUND = 12  # the launch of the recording and the read of what it says among them
MOST_BESIDE_ROUNDS = 200  # a frame's own: its inputs, the guesses that ride, judging the prefill
DRAWS = "ratio-test"  # draws its trees, and no recording may repeat a draw
RECORDED = [one.name for one in METHODS if one.plans[0].rounds and one.name != DRAWS]


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


@pytest.mark.parametrize("method", RECORDED)
def test_a_round_is_one_launch_and_next_to_nothing_beside_it(
    runner: UncountedRunner, policy: OpenVLAPolicy, method: str
) -> None:
    options = ActOptions(decoding=method, statistics_key="first")
    frame = Observation(np.zeros((28, 28, 3), np.uint8), "lift it")
    request = ActRequest(frame, options=options)
    request = replace(request, memory=policy.act([request])[0].memory)
    runner.before_rounds.clear()
    with LaunchCounter() as counter:
        runner.counter = counter
        chunk = policy.act([request])[0].chunk
    runner.counter = None
    counted = runner.before_rounds
    assert chunk.trace is not None
    assert len(counted) == chunk.trace.num_passes - 1 > 0
    per_round = [after - before for before, after in zip(counted, counted[1:], strict=False)]
    assert all(number + 2 <= MOST_PER_ROUND for number in per_round)
    assert counter.total <= MOST_BESIDE_ROUNDS + MOST_PER_ROUND * len(counted)
