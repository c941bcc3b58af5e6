"""Chunks from captured passes: nothing is captured while robots wait, whatever they send."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from deft_core.image_chain import ImageChain
from deft_core.types import ActOptions, Observation
from deft_policies.base import PolicyRequest
from deft_policies.families.loading import load_policy
from deft_policies.families.oft.model import ChunkParts, Oft
from deft_policies.families.oft.policy import OftPolicy
from deft_policies.families.options import ModelOptions
from deft_policies.model.formats import Precision
from deft_policies.model.graphs import StepRunner
from deft_policies.model.image import ImageProcessor
from tests import golden_oft
from tests.fake_graphs import RecordingCapturer
from tests.tiny_openvla import tiny_model

WORDS = ("lift", "the", "red", "cup", "and", "put", "it", "on", "a", "plate")
ROWS, LONGEST = 2, 48
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=["l1_1img", "discrete", "film_2img_proprio"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OftPolicy:
    variant = golden_oft.variants()[request.param]
    directory: Path = variant.write(tmp_path_factory.mktemp("oft") / variant.name)
    options = ModelOptions(
        checkpoint=str(directory),
        num_pictures=variant.num_pictures,
        num_steps=variant.chunk,
        precision=Precision.FLOAT32,
        device="cpu",
        image_chain=ImageChain.NONE,
    )
    return load_policy(options)


def on(policy: OftPolicy, runner: StepRunner) -> OftPolicy:
    ours = policy.model
    assert isinstance(ours, Oft)
    ranges = (ours.statistics, ours.states)
    return OftPolicy(Oft(ours.network, ours.parts, ours.encode, ours.images, *ranges, runner))


def captured(policy: OftPolicy) -> StepRunner:
    assert isinstance(policy.model, Oft)
    reserve = policy.model.reserve(LONGEST, ROWS)
    return StepRunner(RecordingCapturer().capture, reserve)


def batches(policy: OftPolicy, sizes: tuple[int, ...], num_words: int) -> list[list[PolicyRequest]]:
    rng, numbers = random.Random(0), np.random.default_rng(0)
    size = policy.info.image_height
    options = ActOptions(statistics_key=policy.info.statistics_keys[0])
    made = []
    for rows in sizes:
        seen = []
        for _ in range(rows):
            image = numbers.integers(0, 256, (size, size, 3), dtype=np.uint8)
            text = " ".join(rng.choices(WORDS, k=rng.randint(1, num_words)))
            seen.append(policy.model.complete(Observation(image, text)))
        made.append([PolicyRequest(one, options=options) for one in seen])
    return made


def answers(policy: OftPolicy, sent: list[list[PolicyRequest]]) -> np.ndarray:
    return np.array([one.chunk.actions for batch in sent for one in policy.act(batch)])


def test_nothing_is_captured_after_the_warm_up_and_answers_are_the_same(policy: OftPolicy) -> None:
    runner = captured(policy)
    serving = on(policy, runner)
    serving.warm_up()
    num_captured = runner.num_captured
    assert num_captured > 0
    sent = batches(policy, (1, 2, 1, 2, 2), num_words=12)
    assert len({len(one.observation.instruction.split()) for batch in sent for one in batch}) > 3
    found = answers(serving, sent)
    assert runner.num_captured == num_captured
    assert not runner.uncaptured
    np.testing.assert_allclose(found, answers(on(policy, StepRunner()), sent), atol=TOLERANCE)


def test_what_is_beyond_the_reserve_is_answered_all_the_same(policy: OftPolicy) -> None:
    runner = captured(policy)
    serving = on(policy, runner)
    with runner.warming_up():
        pass
    sent = [*batches(policy, (3,), num_words=4), *batches(policy, (1,), num_words=60)]
    plain = answers(on(policy, StepRunner()), sent)
    np.testing.assert_allclose(answers(serving, sent), plain, atol=TOLERANCE)
    assert runner.num_captured == 0


def test_fused_kernels_answer_as_plain_ones_do() -> None:
    pytest.importorskip("triton", reason="fused kernels need Triton")
    from tests.triton_twins import Counted

    launch, found = Counted(), []
    for is_fused in (False, True):
        vla = tiny_model()
        if is_fused:
            vla.fuse(launch.kernels)
        images = ImageProcessor(vla.config.image, ImageChain.NONE)
        model = Oft(vla, ChunkParts(1, 2, 7), list, images, {}, {})
        size = vla.config.image.size
        pixels = torch.randn(2, 1, 6, size, size, generator=torch.Generator().manual_seed(0))
        prompts = model.lay_out([[1, 5, 9], [1, 7, 20, 30, 9]])
        found.append(model.compute(model.see(pixels, prompts), prompts, None))
    (tokens, margins), (fused_tokens, fused_margins) = found
    assert torch.equal(tokens, fused_tokens)
    torch.testing.assert_close(margins, fused_margins, atol=2e-4, rtol=2e-4)
    assert set(launch.launched) == {"rms_norm", "gate_times_up", "add_layer_norm"}
