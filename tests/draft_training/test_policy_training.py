"""A small policy learns from samples made up here, and a killed run resumes to the bit."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from deft_client.image_chain import ImageChain
from deft_draft_training.config import load_config
from deft_draft_training.errors import ConfigError, DivergedError
from deft_draft_training.optimizer import OptimizerConfig, TrainingPrecision
from deft_draft_training.policy.data import (
    AugmentConfig,
    PolicySamples,
    PromptTable,
    augment,
    chosen_at,
)
from deft_draft_training.policy.fit import (
    PolicyFitConfig,
    PolicyLossConfig,
    PolicyTrainer,
    nearest_taught,
    soft_tokens,
    taught_tokens,
    token_loss,
)
from deft_draft_training.policy.growth import deepened
from deft_draft_training.policy.model import PolicyModelConfig, PolicyNet, build_config, initialise
from deft_draft_training.run_directory import STATE_FILE
from deft_policies.decoding.tree import TokenRange
from deft_policies.model.image import ImageProcessor
from deft_policies.model.statistics import ActionStatistics

SIZES = PolicyModelConfig(
    image_size=16,
    patch_size=8,
    tower_width=16,
    tower_depth=2,
    tower_heads=2,
    tower_mlp=32,
    width=32,
    num_layers=2,
    heads=2,
    mlp=48,
)
UNITS = ActionStatistics(q01=-np.ones(7), q99=np.ones(7), mask=np.ones(7, np.bool_))
CONFIG = build_config(SIZES, num_words=20, statistics={"made-up": UNITS})
ACTIONS = CONFIG.vocabulary.tokens
PROMPTS = PromptTable([[1, 5, 6], [1, 5, 7, 8, 9]])


def made_up_samples(count: int = 64) -> PolicySamples:
    """Brightness decides the first token, the prompt the second; the rest is constant."""
    generator = np.random.default_rng(0)
    bright = generator.integers(0, 2, count)
    prompt = generator.integers(0, 2, count)
    labels = np.full((count, 7), ACTIONS.first + 100)
    labels[:, 0] += 40 * bright
    labels[:, 1] += 40 * prompt
    frames = np.repeat(60 + 120 * bright, 16 * 16 * 3).reshape(count, 16, 16, 3).astype(np.uint8)
    positions = np.stack([bright, prompt], axis=1).astype(np.float32)
    return PolicySamples(frames, labels, positions, np.ones(count, np.float32), prompt)


def fit_config(steps: int, save_every: int = 10) -> PolicyFitConfig:
    return PolicyFitConfig(
        model=SIZES,
        augment=AugmentConfig(0, 0.1, 0, 0),
        optimizer=OptimizerConfig(rate=3e-3, clip=1.0, warm_up_steps=5, decay_from=0.5),
        average_decay=0.9,
        steps=steps,
        batch_size=16,
        save_every=save_every,
        log_every=5,
    )


@pytest.mark.parametrize("precision", list(TrainingPrecision))
def test_training_learns_what_picture_and_prompt_say(tmp_path, precision):
    samples = made_up_samples()
    config = replace(fit_config(70), precision=precision)
    trainer = PolicyTrainer(config, CONFIG, samples, PROMPTS)
    net = trainer.run(tmp_path / "run")
    pixels = ImageProcessor(CONFIG.image, ImageChain.NONE).pixel_values(list(samples.frames))
    prompt = torch.from_numpy(samples.prompt)
    labels = torch.from_numpy(samples.labels)
    with torch.no_grad():
        hidden = net(pixels, PROMPTS.ids[prompt], PROMPTS.lengths[prompt], labels)
        tokens = net.read(hidden).logits.argmax(dim=-1)
    near = ((tokens - labels).abs() <= 2).float().mean(dim=0)
    assert near.min() >= 0.95


def test_a_killed_run_resumes_to_the_same_weights(tmp_path):
    samples = made_up_samples()
    whole = PolicyTrainer(fit_config(12, 4), CONFIG, samples, PROMPTS).run(tmp_path / "whole")
    killed = PolicyTrainer(fit_config(12, 4), CONFIG, samples, PROMPTS)
    original = killed._step

    def stop_at(step: int):
        if step == 7:
            raise KeyboardInterrupt
        return original(step)

    killed._step = stop_at  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        killed.run(tmp_path / "killed")
    resumed = PolicyTrainer(fit_config(12, 4), CONFIG, samples, PROMPTS).run(tmp_path / "killed")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def test_a_deepened_policy_computes_what_the_shallow_one_did():
    deep = replace(SIZES, num_layers=5)
    shallow, grown = (
        PolicyNet(build_config(sizes, num_words=20, statistics={"made-up": UNITS}), 2)
        for sizes in (SIZES, deep)
    )
    initialise(shallow, seed=3)
    grown.load_state_dict(deepened(shallow.state_dict(), deep.num_layers))
    samples = made_up_samples(4)
    pixels = ImageProcessor(CONFIG.image, ImageChain.NONE).pixel_values(
        list(samples.frames), torch.device("cpu")
    )
    prompts, labels = PROMPTS.ids[samples.prompt], torch.from_numpy(samples.labels)
    with torch.no_grad():
        before, after = (
            net.read(net(pixels, prompts, PROMPTS.lengths[samples.prompt], labels)).logits
            for net in (shallow, grown)
        )
    assert torch.equal(before, after)


def test_padding_behind_a_shorter_prompt_changes_nothing():
    net = PolicyNet(CONFIG, 2)
    initialise(net, 0)
    pixels = torch.randn(1, 6, 16, 16)
    labels = torch.full((1, 7), ACTIONS.first)
    short = net(pixels, torch.tensor([[1, 5, 6]]), torch.tensor([3]), labels)
    padded = net(pixels, torch.tensor([[1, 5, 6, 0, 0, 0]]), torch.tensor([3]), labels)
    torch.testing.assert_close(short, padded)


def test_every_sample_comes_once_an_epoch():
    seen = np.concatenate([chosen_at(12, 4, seed=1, step=step) for step in range(3, 6)])
    assert sorted(seen) == list(range(12))


ALL_TAUGHT = taught_tokens(TokenRange(10, 19), torch.tensor([12, 12]), 32, step=1)


def test_soft_targets_stay_inside_the_action_range():
    targets = soft_tokens(torch.tensor([10, 15]), ALL_TAUGHT, 2.0)
    torch.testing.assert_close(targets.sum(dim=-1), torch.ones(2))
    assert targets[:, :10].sum() == 0
    assert targets[:, 20:].sum() == 0
    assert targets[1].argmax() == 15


def test_a_label_step_teaches_every_so_many_bins_from_standing_still_and_both_ends():
    is_taught = taught_tokens(TokenRange(10, 19), torch.tensor([13, 16, 12]), 32, step=4)
    taught = [row.nonzero().flatten().tolist() for row in is_taught]
    assert taught == [[10, 13, 17, 19], [10, 12, 16, 19], list(range(10, 20))]
    labels = torch.tensor([[15, 15, 15], [14, 13, 19], [10, 19, 10]])
    moved = nearest_taught(labels, is_taught)
    assert moved.tolist() == [[13, 16, 15], [13, 12, 19], [10, 19, 10]]
    targets = soft_tokens(moved, is_taught, 2.0)
    assert torch.equal(targets > 0, is_taught.expand(3, -1, -1))
    assert torch.equal(targets.argmax(dim=-1), moved)


def test_without_a_label_step_labels_are_as_they_were():
    labels = torch.arange(10, 20).repeat(2, 1).T
    assert torch.equal(nearest_taught(labels, ALL_TAUGHT), labels)


def test_near_misses_cost_less_than_far_ones_but_not_for_the_gripper():
    config = PolicyLossConfig(sigma_bins=2.0)
    labels = torch.full((1, 2), 15)

    def cost(guess: int, dim: int) -> float:
        logits = torch.zeros(1, 2, 32)
        logits[0, :, 15] = 4.0
        logits[0, dim] = 0.0
        logits[0, dim, guess] = 4.0
        return float(token_loss(logits, labels, torch.ones(1), ALL_TAUGHT, config))

    assert cost(16, dim=0) < cost(19, dim=0) - 0.1
    assert abs(cost(16, dim=1) - cost(19, dim=1)) < 1e-6


def test_augmentation_is_repeatable_and_bounded():
    frames = torch.randint(0, 256, (3, 16, 16, 3), dtype=torch.uint8)
    config = AugmentConfig()
    one, again = (augment(frames, config, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(one, again)
    untouched = augment(frames, AugmentConfig(0, 0, 0, 0), torch.Generator().manual_seed(4))
    assert torch.equal(untouched, frames)


def test_augmented_bytes_are_those_of_the_formula_applied_to_every_pixel():
    frames = torch.randint(
        0, 256, (4, 9, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    config = AugmentConfig(shift_pixels=2, brightness=0.5, contrast=0.5, colour=0.5)
    found = augment(frames, config, torch.Generator().manual_seed(4))
    assert torch.equal(found, augment_plainly(frames, config, torch.Generator().manual_seed(4)))


def augment_plainly(
    frames: torch.Tensor, config: AugmentConfig, generator: torch.Generator
) -> torch.Tensor:
    rows, height, width, _ = frames.shape
    offsets = torch.randint(0, 2 * config.shift_pixels + 1, (rows, 2), generator=generator)
    shifted = torch.empty(frames.shape)
    for row, y, x in product(range(rows), range(height), range(width)):
        down, along = (offsets[row] - config.shift_pixels).tolist()
        at = (min(max(y + down, 0), height - 1), min(max(x + along, 0), width - 1))
        shifted[row, y, x] = frames[row][at].float()

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) * 2 - 1

    gain = 1 + config.brightness * draw(rows, 1, 1, 1)
    gain = gain * (1 + config.colour * draw(rows, 1, 1, 3))
    contrast = 1 + config.contrast * draw(rows, 1, 1, 1)
    centre = shifted.mean(dim=(1, 2, 3), keepdim=True)
    return ((shifted - centre) * contrast + centre).mul(gain).clamp(0, 255).round().byte()


def test_a_run_whose_loss_is_not_finite_ends_with_an_error_and_what_was_saved(tmp_path):
    """Once it went on to its end, and ended with success."""
    samples = made_up_samples()
    PolicyTrainer(fit_config(4, 4), CONFIG, samples, PROMPTS).run(tmp_path / "run")
    saved = (tmp_path / "run" / STATE_FILE).read_bytes()
    trainer = PolicyTrainer(fit_config(8, 4), CONFIG, samples, PROMPTS)
    trainer.samples = replace(samples, positions=np.full_like(samples.positions, np.nan))
    with pytest.raises(DivergedError, match="step 4"):
        trainer.run(tmp_path / "run")
    assert (tmp_path / "run" / STATE_FILE).read_bytes() == saved


@pytest.mark.parametrize("name", ["steps", "batch_size", "save_every", "log_every"])
def test_counts_below_one_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"'{name}': 0"):
        load_config(PolicyFitConfig, None, [f"{name}=0"])
