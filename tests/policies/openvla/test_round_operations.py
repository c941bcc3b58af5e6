"""What a round costs the host outside of captured steps: operations, and reads of the device."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from deft_client.types import ActOptions, Observation
from deft_policies.base import ActRequest
from deft_policies.model.graphs import CapturedRunner
from deft_policies.model.layout import Step, Tensors
from tests.launches import LaunchCounter
from tests.policies.openvla.test_captured_serving import RESERVE, policy_on
from tests.recorder import RecordingCapturer

# As counted, to be lowered: the goal is 12, with judging inside of the captured step.
MOST_PER_ROUND = 160


class UncountedRunner(CapturedRunner):
    """What captured steps do is not counted, but copying their inputs is."""

    counter: LaunchCounter | None = None

    def run(self, key: Hashable, step: Step, inputs: Tensors) -> Tensors:
        if self.counter is None:
            return super().run(key, step, inputs)
        before = Counter(self.counter.counts)
        outputs = super().run(key, step, inputs)
        before["copies of inputs"] += len({one.dtype for one in inputs})
        self.counter.counts = before
        return outputs


def test_a_round_of_a_head_takes_few_operations_outside_of_captured_steps() -> None:
    runner = UncountedRunner(RecordingCapturer(), replace(RESERVE, rows=1))
    policy = policy_on(runner)
    policy.warm_up()
    options = ActOptions(decoding="spec-vla", statistics_key="first")
    frame = Observation(np.zeros((28, 28, 3), np.uint8), "lift it")
    request = ActRequest(frame, options=options)
    request = replace(request, memory=policy.act([request])[0].memory)
    with LaunchCounter() as counter:
        runner.counter = counter
        chunk = policy.act([request])[0].chunk
    runner.counter = None
    assert chunk.trace is not None
    assert counter.total <= MOST_PER_ROUND * chunk.trace.num_passes
