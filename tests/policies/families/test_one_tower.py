"""One SigLIP tower, letterboxed pictures, a projector of two layers: ECoT's Bridge checkpoint."""

import hashlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from deft_core.image_chain import ImageChain
from deft_policies.checkpoint.config import load_encoder
from deft_policies.checkpoint.open import Checkpoint, load_model
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.model.image import ImageProcessor
from deft_policies.model.prompt import PromptTemplate
from deft_policies.model.sizes import ResizeStrategy
from deft_policies.model.vla import OpenVLAModel
from tests import golden_ecot
from tests.policies.checkpoint.checkpoint_files import open_checkpoint
from tests.tiny_openvla import CPU

CASES: list[Mapping[str, Any]] = golden_ecot.expected(golden_ecot.ONE_TOWER)["cases"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = golden_ecot.write(tmp_path_factory.mktemp("one") / "tower", golden_ecot.ONE_TOWER)
    return open_checkpoint(str(folder))


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> OpenVLAModel:
    return load_model(checkpoint, CPU, torch.float32)


def test_the_configuration_of_one_tower_is_read(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    assert [tower.prefix for tower in config.towers] == ["vision_backbone.featurizer"]
    assert config.image.resize is ResizeStrategy.LETTERBOX
    assert not config.image.is_stretched
    assert not config.is_fused
    assert config.prompt_template is PromptTemplate.V01


def test_pictures_are_letterboxed_to_the_last_bit(checkpoint: Checkpoint) -> None:
    images = ImageProcessor(checkpoint.config.image, ImageChain.NONE)
    sizes = set()
    for case in CASES:
        frame = golden_ecot.picture(case["image"])
        pixels = images.pixel_values([images.fit(frame)])
        assert pixels.shape == (1, 3, 224, 224)
        digest = hashlib.sha256(pixels.contiguous().numpy().tobytes()).hexdigest()
        assert digest == case["pixel_values_sha256"]
        sizes.add(frame.shape[:2])
    assert any(height != width for height, width in sizes)


@pytest.mark.promise
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["case"]))
@torch.inference_mode()
def test_every_token_is_the_originals_given_those_before_it(
    checkpoint: Checkpoint, model: OpenVLAModel, case: Mapping[str, Any]
) -> None:
    encoder = load_encoder(checkpoint.source.directory, PromptTemplate.ECOT, 32000)
    ids = list(encoder.encode(case["instruction"]))
    assert ids == case["prompt_ids"]
    images = ImageProcessor(checkpoint.config.image, ImageChain.NONE)
    pixels = images.pixel_values([images.fit(golden_ecot.picture(case["image"]))])
    answer = case["generated_ids"]
    hidden = model(pixels, torch.tensor([[*ids, *answer[:-1]]]))[0, -len(answer) :]
    best = model.decoder.head(hidden).topk(2, dim=1)
    assert best.indices[:, 0].tolist() == answer
    margins = best.values[:, 0] - best.values[:, 1]
    assert float(margins.min()) == pytest.approx(case["min_margin"], abs=1e-3)


def test_a_checkpoint_of_one_tower_serves_as_a_model_that_acts_at_once(
    checkpoint: Checkpoint,
) -> None:
    options = ModelOptions(
        checkpoint=str(checkpoint.source.directory), statistics_key="bridge_orig", device="cpu"
    )
    policy = load_policy(options)
    policy.warm_up()
    assert policy.info.policy == "openvla"
