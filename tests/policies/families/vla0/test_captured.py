"""VLA-0 as a GPU serves it: everything is captured at the start, and the tower may be fused."""

from dataclasses import replace

import pytest
import torch

from deft_core.types import ActOptions, Observation
from deft_policies.base import PolicyRequest
from deft_policies.decoding.captured import shapes_of
from deft_policies.decoding.warm_up import capture
from deft_policies.families.loading import open_model
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy, _RunningRequest
from deft_policies.families.vla0.family import Vla0Family
from deft_policies.families.vla0.model import WIDEST, Vla0
from deft_policies.memory import SessionMemory
from deft_policies.model.graphs import StepRunner
from deft_policies.model.qwen_vision import FRAMES, PATCH, QwenVision, QwenVisionSizes
from deft_policies.model.vla import fuse
from tests.fake_graphs import RecordingCapturer
from tests.golden_vla0 import GOLDEN, VARIANTS, cameras, variant

CPU = torch.device("cpu")
METHODS = ("lossless", "numbers", "autoregressive")
LENGTH = 10  # tokens of an answer: the texts are cut, which changes nothing of what runs


def family_of(name: str) -> Vla0Family:
    options = ModelOptions(checkpoint=str(GOLDEN / name), largest_batch=2, max_tokens=LENGTH)
    found = open_model(options)
    assert isinstance(found, Vla0Family)
    return found


def policy_on(name: str, runner: StepRunner) -> VlaPolicy:
    family = family_of(name)
    return VlaPolicy(family.load(CPU, torch.float32, runner), family.options)


def requests_of(name: str, first: int, memories: list[SessionMemory]) -> list[PolicyRequest]:
    found = []
    for index, memory in enumerate(memories):
        frame = variant(name)["cases"][first + index]
        image, wrist = cameras(frame)
        options = ActOptions(decoding=METHODS[(first + index) % 3], want_trace=True)
        shown = Observation(image, frame["instruction"], {"wrist": wrist})
        found.append(PolicyRequest(shown, memory, options))
    return found


def serve(policy: VlaPolicy, name: str) -> list[tuple[int, ...]]:
    """The tokens of frames that are answered alone and together, be they actions or not."""
    found = []
    for first, size in ((0, 1), (1, 2)):
        requests = requests_of(name, first, [SessionMemory()] * size)
        frames = policy.start(requests)
        while any(not one.has_ended for one in frames):
            policy.step()
        for one in frames:
            assert isinstance(one, _RunningRequest)
            assert one.sequence is not None
            found.append(tuple(one.sequence.tokens))
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_a_default_server_runs_nothing_uncaptured(name: str) -> None:
    runner = StepRunner(RecordingCapturer().capture, family_of(name).reserve)
    policy = policy_on(name, runner)
    with runner.warming_up(), torch.inference_mode():
        policy.model.capture()
        capture(policy.engine)
    num_captured = runner.num_captured
    shapes = shapes_of(runner.reserve, WIDEST, keeps_hidden=False)
    assert num_captured == len(shapes) + len(runner.reserve.batches)
    assert serve(policy, name) == serve(policy_on(name, StepRunner()), name)
    assert runner.num_captured == num_captured
    assert not runner.uncaptured


def test_what_is_planned_is_what_an_engine_sets_aside() -> None:
    family = family_of("tied")
    policy = policy_on("tied", StepRunner(RecordingCapturer().capture, family.reserve))
    assert isinstance(policy.model, Vla0)
    planned = family.planned_bytes(torch.float32)
    assert planned["keys and values"] == policy.engine.cache.data.nbytes
    assert planned["pictures"] > 0
    more = Vla0Family(family.source, replace(family.options, largest_batch=8))
    assert more.planned_bytes(torch.float32)["pictures"] > planned["pictures"]


@pytest.mark.parametrize("grid", [(6, 8), (4, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_fused_kernels_see_what_modules_do(dtype: torch.dtype, grid: tuple[int, int]) -> None:
    """Also in windows of several sizes."""
    pytest.importorskip("triton", reason="fused kernels need Triton")
    from tests.triton_twins import Counted

    torch.manual_seed(0)
    vision = QwenVision(QwenVisionSizes(32, 44, 2, 2, 48, 56, frozenset((1,))))
    vision, launch = vision.to(dtype).requires_grad_(False), Counted()
    patches = torch.randn(2, grid[0] * grid[1], 3 * FRAMES * PATCH**2, dtype=dtype)
    expected = vision(patches, grid)
    fuse(vision, launch.kernels)
    found = vision(patches, grid)
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert launch.launched.count("rms_norm") == 2 * 2 + 1
    products = 1 + 2 * 5 + 2  # of patches, blocks and tokens
    assert launch.launched.count("product") == products * (dtype is torch.float16)
