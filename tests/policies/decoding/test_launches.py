"""How many kernels a round starts outside of the layers, with fused kernels and without.

Counted on a CPU, operation by operation, with the shapes and the code of captured passes: the
upload of the trees, the pass without its layers, and the read of the scores. A layer's share is the
difference between models of four and of two layers. Fused kernels are counted and not run.
"""

import pytest
import torch

pytest.importorskip("triton", reason="fused kernels need Triton")

from deft_policies.decoding import read
from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.sequence import AnswerSpec, Sequence
from deft_policies.families.openvla import VlaTarget
from deft_policies.memory import SessionMemory
from deft_policies.model import cpu_products
from deft_policies.model.graphs import Reserve, StepRunner
from tests.fake_graphs import RecordingCapturer
from tests.launches import LaunchCounter
from tests.tiny_openvla import CPU, random_prompts, tiny_model
from tests.triton_twins import Counted

LENGTH = 7


def launches(method: str, num_layers: int, is_fused: bool) -> tuple[int, int]:
    """Launches of the prefill and of the round behind it."""
    model, kernels = tiny_model(num_layers=num_layers).half(), Counted(is_run=False)
    if is_fused:
        model.fuse(kernels.kernels)
    runner = StepRunner(RecordingCapturer().capture, Reserve(rows=2, longest=32))
    with runner.warming_up():  # sealed, so that every pass runs operation by operation
        pass
    engine = Engine(VlaTarget(model, runner=runner), widest=8, longest_answer=LENGTH)
    first = engine.target.action_tokens.first
    own = tuple((first + step,) * LENGTH for step in range(3))
    spec = AnswerSpec.action(ActionSpace.in_bins(LENGTH))
    counts, clock = [], StageClock(CPU)
    for _ in range(2):  # the first answer makes tables that are kept
        answer = Sequence(find_method(method), spec, SessionMemory(own=own))
        engine.start(random_prompts(model, [5]), [answer])
        for _ in range(2):
            kernels.launched.clear()
            with torch.no_grad(), LaunchCounter() as counter:
                engine.step(clock)
            counts.append(counter.total + len(kernels.launched))
        engine.cancel(answer)
    return counts[2], counts[3]


@pytest.mark.parametrize(
    ("method", "is_fused", "prefill", "later"),
    [
        ("autoregressive", True, 15, 15),
        ("lossless:plan=memory", True, 17, 13),
        ("autoregressive", False, 28, 38),
        ("lossless:plan=memory", False, 35, 36),
    ],
)
def test_launches_outside_of_the_layers(
    method: str, is_fused: bool, prefill: int, later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "_AMONG", (8,))  # rows that loading asks about
    monkeypatch.setattr(cpu_products, "_ALONE", (0, 5))
    monkeypatch.setattr(read, "isfinite", lambda number: True)  # what was not run is no number
    two, four = (launches(method, num_layers, is_fused) for num_layers in (2, 4))
    outside = [less - (more - less) for less, more in zip(two, four, strict=True)]
    assert outside == [prefill, later]
