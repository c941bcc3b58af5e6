"""OFT fine-tunes answer as OFT's own code does; each mistake that is easily made would show."""

import hashlib
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from deft_core.image_chain import ImageChain
from deft_core.types import ActionChunk, ActOptions
from deft_policies.base import PolicyRequest
from deft_policies.checkpoint.config import EXTREMES, QUANTILES, parse_statistics
from deft_policies.checkpoint.fields import JsonFields
from deft_policies.checkpoint.tensor_file import read_tensors
from deft_policies.families.action_tokens import RANGE_EPS, unnormalise
from deft_policies.families.loading import load_policy
from deft_policies.families.oft.files import FilmTowers
from deft_policies.families.oft.model import Oft, normalise_state
from deft_policies.families.oft.modules import StateProjector
from deft_policies.families.oft.policy import OftPolicy
from deft_policies.families.options import ModelOptions
from deft_policies.model.formats import Precision
from deft_policies.model.graphs import StepRunner
from deft_policies.model.image import ImageProcessor
from deft_policies.model.statistics import ActionStatistics
from tests import golden_oft
from tests.fake_graphs import RecordingCapturer
from tests.golden_oft import OftCase
from tests.policies.families.oft.slow_forward import (
    FILM_MISTAKES,
    STATE_MISTAKES,
    Mistake,
    slow_actions,
    slow_hidden,
)

pytestmark = pytest.mark.promise

TOLERANCE = 1e-4
# Attention of the variant that answers with tokens is sharp.
SHARP_TOLERANCE = 2e-3
CASES = golden_oft.cases()
NAMES = [case.name for case in CASES]

Policies = Mapping[str, OftPolicy]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    loaded = {}
    for name, variant in golden_oft.variants().items():
        directory = variant.write(tmp_path_factory.mktemp("oft") / name)
        loaded[name] = load_policy(
            ModelOptions(
                checkpoint=str(directory),
                num_pictures=variant.num_pictures,
                num_steps=variant.chunk,
                precision=Precision.FLOAT32,
                device="cpu",
                image_chain=ImageChain.OFT,
            )
        )
    return loaded


def request_for(case: OftCase) -> PolicyRequest:
    """A case as a robot sends it."""
    options = ActOptions(statistics_key=case.statistics_key, want_trace=True)
    return PolicyRequest(case.observation(), options=options)


def answer(policies: Policies, case: OftCase) -> ActionChunk:
    policy, request = policies[case.variant.name], request_for(case)
    if not case.fields["center_crop"]:
        policy = with_chain(policy, ImageChain.OFT_UNCROPPED)
    policy.check(request.observation, request.options)
    return policy.act([request])[0].chunk


def with_chain(policy: OftPolicy, chain: ImageChain) -> OftPolicy:
    ours = oft_of(policy)
    images = ImageProcessor(ours.network.config.image, chain)
    ranges = (ours.statistics, ours.states)
    return OftPolicy(Oft(ours.network, ours.parts, ours.encode, images, *ranges))


def oft_of(policy: OftPolicy) -> Oft:
    assert isinstance(policy.model, Oft)
    return policy.model


def inputs_of(policies: Policies, case: OftCase) -> tuple[Oft, Tensor, list[int], Tensor]:
    """Model, pixels [picture, ...], prompt ids and normalised state of a case."""
    ours = oft_of(policies[case.variant.name])
    chain = ImageChain.OFT if case.fields["center_crop"] else ImageChain.OFT_UNCROPPED
    images = ImageProcessor(ours.network.config.image, chain)
    observation = request_for(case).observation
    pictures = [observation.image, *observation.cameras.values()]
    pixels = images.pixel_values([images.fit(one) for one in pictures])
    state = torch.tensor(case.fields.get("state_normalised", []), dtype=torch.float32)
    return ours, pixels, list(ours.encode(case.instruction)), state


def hidden_of(policies: Policies, case: OftCase, mistake: Mistake | None = None) -> Tensor:
    model, pixels, ids, state = inputs_of(policies, case)
    return slow_hidden(model, pixels, ids, state if len(state) else None, mistake)


def distance(found: Tensor, expected: np.ndarray) -> float:
    return float(np.abs(found.numpy() - expected).max())


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_policy_answers_as_the_original_does(policies: Policies, case: OftCase) -> None:
    chunk = answer(policies, case)
    assert chunk.actions.shape == (case.variant.chunk, case.variant.action_dim)
    if case.variant.has_head:
        assert chunk.trace is None
        np.testing.assert_allclose(chunk.actions, case.actions, rtol=0, atol=TOLERANCE)
    else:
        assert chunk.trace is not None
        assert chunk.trace.tokens == tuple(np.ravel(case.fields["tokens"]).tolist())
        np.testing.assert_array_equal(chunk.actions, case.actions)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_pictures_and_prompts_are_the_original_ones(policies: Policies, case: OftCase) -> None:
    _, pixels, ids, _ = inputs_of(policies, case)
    assert ids == case.fields["prompt_ids"]
    digest = hashlib.sha256(np.ascontiguousarray(pixels.flatten(0, 1)[None])).hexdigest()
    assert digest == case.fields["pixel_values_sha256"]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_slow_forward_finds_the_original_hidden_states(
    policies: Policies, case: OftCase
) -> None:
    hidden = hidden_of(policies, case)
    if f"{case.name}_hidden" in golden_oft.arrays():
        tolerance = TOLERANCE if case.variant.has_head else SHARP_TOLERANCE
        assert distance(hidden, case.array("hidden")) < tolerance
    if case.variant.has_head:
        found = slow_actions(oft_of(policies[case.variant.name]), hidden)
        assert distance(found, case.array("normalised")) < TOLERANCE


@pytest.mark.parametrize("mistake", Mistake, ids=lambda one: one.name)
def test_a_mistake_in_the_forward_is_seen(policies: Policies, mistake: Mistake) -> None:
    """The golden actions tell each mistake from the right thing, by 30 times the tolerance."""
    name = "l1_1img"
    if mistake in STATE_MISTAKES or mistake is Mistake.LAST_PICTURE_FIRST:
        name = "l1_2img_proprio"
    if mistake in FILM_MISTAKES:
        name = "film_2img_proprio"
    case = next(case for case in CASES if case.variant.name == name)
    model = oft_of(policies[name])
    found = slow_actions(model, hidden_of(policies, case, mistake), mistake)
    assert distance(found, case.array("normalised")) > 30 * TOLERANCE


def test_the_state_projector_is_rounded_to_bfloat16(policies: Policies) -> None:
    case = next(case for case in CASES if case.variant.name == "l1_2img_proprio")
    model, _, _, state = inputs_of(policies, case)
    rounded = model.parts.state
    assert rounded is not None
    expected = case.array("proprio_embedding")
    assert distance(rounded(state), expected) < 1e-6
    variant = case.variant
    (path,) = (golden_oft.OFT / variant.name).glob("proprio_projector*")
    exact = StateProjector(len(state), len(expected))
    exact.load_state_dict(
        {name.removeprefix("module."): one for name, one in read_tensors(path).items()}
    )
    assert distance(exact(state).detach(), expected) > 1e-4


@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_the_scale_of_the_towers_adapters_counts(policies: Policies, factor: float) -> None:
    """Rank 32 means a scale of one half; 1 and 0 (the adapter left out) give other weights."""
    case = next(case for case in CASES if case.variant.name == "film_2img_proprio")
    (path,) = (golden_oft.OFT / case.variant.name).glob("vision_backbone*")
    tensors = read_tensors(path)
    scaled = {name: one * factor if ".lora_B." in name else one for name, one in tensors.items()}
    model, pixels, ids, state = inputs_of(policies, case)
    kept = {name: one.clone() for name, one in model.network.towers.state_dict().items()}
    wrong = FilmTowers(path, scaled)
    try:
        for name, weight in model.network.named_tensors().items():
            weight.copy_(wrong.merge(name, weight))
        found = slow_actions(model, slow_hidden(model, pixels, ids, state))
    finally:
        model.network.towers.load_state_dict(kept)
    assert distance(found, case.array("normalised")) > 30 * TOLERANCE


def test_the_instruction_is_averaged_as_in_the_original(policies: Policies) -> None:
    for case in CASES:
        if f"{case.name}_language_mean" in golden_oft.arrays():
            model, _, ids, _ = inputs_of(policies, case)
            prompts = model.lay_out([ids])
            found = model.mean_embedding(prompts.ids, prompts.lengths)[0]
            assert distance(found, case.array("language_mean")) < 1e-6


def ranges_of(
    case: OftCase, scheme: tuple[str, str]
) -> tuple[ActionStatistics, ActionStatistics | None]:
    path = golden_oft.OFT / case.variant.name / "dataset_statistics.json"
    statistics = JsonFields.load(path, "")
    actions, states = (parse_statistics(statistics, one, scheme) for one in ("action", "proprio"))
    return actions[case.statistics_key], states.get(case.statistics_key)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_actions_are_stretched_to_the_last_bit(case: OftCase) -> None:
    is_aloha = case.variant.action_dim == 14
    scheme = EXTREMES if is_aloha else QUANTILES
    other = QUANTILES if is_aloha else EXTREMES
    normalised = case.array("normalised")
    ranges = ranges_of(case, scheme)[0]
    found = unnormalise(normalised, ranges, RANGE_EPS)
    np.testing.assert_array_equal(found, case.actions)
    wrong = unnormalise(normalised, ranges_of(case, other)[0], RANGE_EPS)
    assert np.abs(wrong - case.actions).max() > 1e-2
    if case.variant.has_head:
        widened = unnormalise(normalised.astype(np.float64), ranges, RANGE_EPS)
        assert not np.array_equal(widened, case.actions)


def test_the_range_is_widened_a_little_before_stretching() -> None:
    ranges = ActionStatistics(np.zeros(1), np.zeros(1), np.ones(1, dtype=bool))
    assert unnormalise(np.ones((1, 1)), ranges, RANGE_EPS).item() == 1e-8


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_states_are_normalised_to_the_last_bit_and_cut_off(case: OftCase) -> None:
    if case.state is None:
        return
    is_aloha = case.variant.action_dim == 14
    scheme = EXTREMES if is_aloha else QUANTILES
    _, ranges = ranges_of(case, scheme)
    assert ranges is not None
    found = normalise_state(case.state, ranges)
    np.testing.assert_array_equal(found, np.array(case.fields["state_normalised"]))
    assert np.abs(found).max() <= 1.0


def test_a_constant_state_is_normalised_as_in_the_original() -> None:
    stored = golden_oft.conventions()["proprio_normalisation"]
    low, high = (np.array(stored["stats"][row]) for row in QUANTILES)
    assert (low == high).any()
    ranges = ActionStatistics(low, high, np.ones(len(low), dtype=bool))
    for one in stored["cases"]:
        found = normalise_state(np.array(one["state"]), ranges)
        np.testing.assert_array_equal(found, one["normalised"])


def test_a_frame_that_a_client_prepared_is_not_compressed_twice() -> None:
    """OFT's client compresses every frame, its server only those of another size than 224."""
    case = next(case for case in CASES if case.name == "l1_2img_proprio_2")
    sent = [ImageChain.LIBERO_UNCROPPED.apply(one) for one in case.images()]
    digests = [hashlib.sha256(np.ascontiguousarray(one)).hexdigest() for one in sent]
    assert digests == case.fields["client_images_sha256"]
    assert case.images()[0].shape == (224, 224, 3)
    assert not np.array_equal(sent[0], case.images()[0])
    for chain, again in (
        (ImageChain.OFT, ImageChain.LIBERO),
        (ImageChain.OFT_UNCROPPED, ImageChain.LIBERO_UNCROPPED),
    ):
        assert not np.array_equal(chain.apply(sent[0]), again.apply(sent[0]))
    assert np.array_equal(ImageChain.OFT_UNCROPPED.apply(sent[0]), sent[0])


@pytest.mark.parametrize("name", sorted(golden_oft.variants()))
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_batch_of_different_prompts_is_answered_like_its_frames_alone(
    policies: Policies, name: str, is_recorded: bool
) -> None:
    policy = policies[name]
    if is_recorded:
        ours = oft_of(policy)
        runner, ranges = StepRunner(RecordingCapturer().capture), (ours.statistics, ours.states)
        again = Oft(ours.network, ours.parts, ours.encode, ours.images, *ranges, runner)
        policy = OftPolicy(again)
    cases = [case for case in CASES if case.variant.name == name and case.fields["center_crop"]]
    assert len({len(case.fields["prompt_ids"]) for case in cases[:3]}) > 1
    chunks = [one.chunk for one in policy.act([request_for(case) for case in cases[:3]])]
    for case, chunk in zip(cases, chunks, strict=False):
        if case.variant.has_head:
            np.testing.assert_allclose(chunk.actions, case.actions, rtol=0, atol=TOLERANCE)
        else:
            np.testing.assert_array_equal(chunk.actions, case.actions)
