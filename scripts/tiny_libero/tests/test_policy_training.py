"""A small policy learns from samples made up here, and a killed run resumes to the bit."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from deft_core.image_chain import ImageChain
from deft_draft_training.config import load_config
from deft_draft_training.errors import ConfigError, DataError, DivergedError
from deft_draft_training.optimizer import OptimizerConfig, TrainingPrecision
from deft_draft_training.run_directory import STATE_FILE
from deft_draft_training.trainer import chosen_at
from deft_policies.model.image import ImageProcessor
from deft_policies.model.prompt import PromptEncoder, PromptTemplate
from deft_policies.model.sizes import TokenRange
from deft_policies.model.statistics import ActionStatistics
from tiny_libero_recipe.data import (
    AugmentConfig,
    Batches,
    PolicyBatch,
    PolicySamples,
    Request,
    augment,
)
from tiny_libero_recipe.demonstration_writer import encode_frame
from tiny_libero_recipe.fit import (
    PolicyFitConfig,
    PolicyLossConfig,
    PolicyTrainer,
    action_loss,
    soft_tokens,
    text_loss,
)
from tiny_libero_recipe.language import TAGS, THINGS, sentence, vocabulary
from tiny_libero_recipe.model import (
    PolicyModelConfig,
    PolicyNet,
    build_config,
    deepened,
    initialise,
)
from tiny_libero_recipe.tokenizer import build_tokenizer, words_of_thoughts
from tiny_libero_recipe.train import Prepared, write_policy

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
UNITS = ActionStatistics(low=-np.ones(7), high=np.ones(7), mask=np.ones(7, np.bool_))
TOKENIZER = build_tokenizer(["lift the milk", "put the butter", *vocabulary()], TAGS)
CONFIG = build_config(SIZES, TOKENIZER.get_vocab_size(), {"made-up": UNITS})
ACTIONS = CONFIG.action_tokens
REQUESTS = (Request("lift the milk"), Request("put the butter"))


def made_up_samples(count: int = 64) -> PolicySamples:
    """Brightness decides the first token, the request the second; the rest is constant.

    Thoughts name both.
    """
    generator = np.random.default_rng(0)
    bright = generator.integers(0, 2, count)
    asked = generator.integers(0, 2, count)
    labels = np.full((count, 7), ACTIONS.first + 100)
    labels[:, 0] += 40 * bright
    labels[:, 1] += 40 * asked
    frames = [np.full((16, 16, 3), 60 + 120 * one, np.uint8) for one in bright]
    names = np.array(["milk", "butter"])
    return PolicySamples(
        encoded=[encode_frame(frame, "png") for frame in frames],
        labels=labels,
        positions=np.stack([bright, asked], axis=1).astype(np.float32),
        weights=np.ones(count, np.float32),
        requests=[REQUESTS[one] for one in asked],
        thoughts=[
            f"Put the {names[one]} PLAN: {'lift,' if light else 'carry,'} ACTION:"
            for one, light in zip(asked, bright, strict=True)
        ],
    )


def fit_config(steps: int, save_every: int = 10) -> PolicyFitConfig:
    return PolicyFitConfig(
        model=SIZES,
        augment=AugmentConfig(0, 0.1, 0, 0),
        optimizer=OptimizerConfig(rate=3e-3, clip=1.0, warm_up_steps=5, decay_from=0.5),
        average_decay=0.9,
        thinking_share=0.0,
        steps=steps,
        batch_size=16,
        save_every=save_every,
        log_every=5,
    )


@pytest.mark.parametrize("precision", list(TrainingPrecision))
def test_training_learns_what_picture_and_request_say(tmp_path, precision):
    samples = made_up_samples()
    config = replace(fit_config(160), precision=precision)
    net = PolicyTrainer(config, CONFIG, samples, TOKENIZER).run(tmp_path / "run")
    near = (
        ((answers_of(net, samples)[:, :7] - torch.from_numpy(samples.labels)).abs() <= 2)
        .float()
        .mean(dim=0)
    )
    assert near.min() >= 0.95


def test_one_policy_learns_to_act_at_once_and_to_think_aloud(tmp_path):
    samples = made_up_samples()
    config = replace(fit_config(300), thinking_share=0.5)
    net = PolicyTrainer(config, CONFIG, samples, TOKENIZER).run(tmp_path / "run")
    near = (
        ((answers_of(net, samples)[:, :7] - torch.from_numpy(samples.labels)).abs() <= 2)
        .float()
        .mean(dim=0)
    )
    assert near.min() >= 0.95
    batch = Batches(samples, TOKENIZER, CONFIG).take(
        np.arange(8), np.random.default_rng(0), thinks=True
    )
    said = answers_of(net, samples, thinks=True)[:8]
    is_text = (batch.answers >= 0) & ~ACTIONS.contains(batch.answers)
    assert torch.equal(said[is_text], batch.answers[is_text])
    for row, first in enumerate(batch.first_actions):
        action = said[row, first : first + 7]
        assert ((action - batch.labels[row]).abs() <= 2).all()


def answers_of(net: PolicyNet, samples: PolicySamples, thinks: bool = False) -> torch.Tensor:
    """The likeliest token of each step, given the right ones before it."""
    return scores_of(net, samples, thinks)[0].argmax(dim=-1)


def scores_of(
    net: PolicyNet, samples: PolicySamples, thinks: bool = False
) -> tuple[torch.Tensor, PolicyBatch]:
    """What every token scores at each step, given the right ones before it, and the samples."""
    batches = Batches(samples, TOKENIZER, CONFIG)
    batch = batches.take(np.arange(len(samples)), np.random.default_rng(0), thinks)
    pixels = ImageProcessor(CONFIG.image, ImageChain.NONE).pixel_values(list(batch.frames.numpy()))
    with torch.no_grad():
        hidden = net(pixels, batch.ids, batch.prompt_lengths, batch.answers.shape[1])
        return net.read(hidden).logits, batch


def test_a_thinking_sample_is_prompt_text_action_and_end():
    samples = made_up_samples()
    batches = Batches(samples, TOKENIZER, CONFIG)
    batch = batches.take(np.array([3]), np.random.default_rng(0), thinks=True)
    prompt = batch.ids[0, : batch.prompt_lengths[0]].tolist()
    told = TOKENIZER.decode(prompt)
    assert told == PromptTemplate.ECOT.fill(samples.requests[3].instruction)
    answer, first = batch.answers[0].tolist(), int(batch.first_actions[0])
    assert TOKENIZER.decode(answer[:first]) == samples.thoughts[3]
    assert answer[first:] == [*samples.labels[3], TOKENIZER.token_to_id("</s>")]
    assert batch.ids[0, len(prompt) :].tolist() == answer[:-1]


def test_an_acting_sample_is_openvlas_prompt_and_the_action_alone():
    samples = made_up_samples()
    batches = Batches(samples, TOKENIZER, CONFIG)
    batch = batches.take(np.array([3, 4, 5]), np.random.default_rng(0))
    encoder = PromptEncoder(TOKENIZER, PromptTemplate.OPENVLA, Path("here"))
    for row, index in enumerate((3, 4, 5)):
        prompt = encoder.encode(samples.requests[index].instruction)
        length = int(batch.prompt_lengths[row])
        assert tuple(batch.ids[row, :length].tolist()) == prompt
        assert batch.answers[row].tolist() == samples.labels[index].tolist()
    assert batch.first_actions.tolist() == [0, 0, 0]


def test_an_action_has_half_of_the_loss_where_it_thinks_aloud():
    config = fit_config(1)
    trainer = PolicyTrainer(config, CONFIG, made_up_samples(), TOKENIZER)
    assert trainer._weight("thinking_action", True) == trainer._weight("text", True) == 0.5
    assert trainer._weight("action", False) == 1.0


def test_what_does_not_say_what_was_asked_for_is_not_thought_about():
    samples = replace(made_up_samples(2), thoughts=["", ""])
    PolicyTrainer(fit_config(1), CONFIG, samples, TOKENIZER)
    with pytest.raises(DataError, match="record them again, or set fit.thinking_share to 0"):
        PolicyTrainer(replace(fit_config(1), thinking_share=0.3), CONFIG, samples, TOKENIZER)


def test_text_loss_counts_words_and_the_end_but_not_the_action():
    batches = Batches(made_up_samples(), TOKENIZER, CONFIG)
    batch = batches.take(np.array([0, 1]), np.random.default_rng(0), thinks=True)
    steps = batch.answers.shape[1]
    logits = torch.zeros(2, steps, CONFIG.llm.vocabulary)
    even = float(text_loss(logits, batch))
    first = int(batch.first_actions[0])
    logits[0, first : first + 7] = torch.randn(7, CONFIG.llm.vocabulary)
    assert float(text_loss(logits, batch)) == pytest.approx(even)
    logits[0, first + 7, TOKENIZER.token_to_id("</s>")] = 5.0
    assert float(text_loss(logits, batch)) < even


def test_thoughts_alone_are_taught_without_a_change_to_acting_at_once(tmp_path):
    samples = made_up_samples()
    taught = replace(fit_config(40), thinking_share=0.5)
    before = PolicyTrainer(taught, CONFIG, samples, TOKENIZER).run(tmp_path / "run")
    checkpoint = tmp_path / "checkpoint"
    write_policy(before, Prepared(CONFIG, TOKENIZER, samples), checkpoint, torch.float32)

    config = replace(taught, only_thoughts=True, steps=60)
    trainer = PolicyTrainer(config, CONFIG, samples, TOKENIZER)
    after = trainer.run(tmp_path / "thoughts", warm_start=checkpoint)

    words = words_of_thoughts(TOKENIZER)
    others = [row for row in range(CONFIG.llm.vocabulary) if row not in words]
    old, new = before.model.named_tensors(), after.model.named_tensors()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {
        f"language_model.{name}.weight" for name in ("model.embed_tokens", "lm_head")
    }
    for name in changed:
        torch.testing.assert_close(old[name][others], new[name][others], atol=1e-6, rtol=1e-6)
    was, now = (scores_of(net, samples)[0][..., others] for net in (before, after))
    torch.testing.assert_close(was, now, atol=1e-5, rtol=1e-5)
    assert loss_of_thoughts(after, samples) < 0.8 * loss_of_thoughts(before, samples)


def test_words_of_thoughts_are_in_no_prompt_that_is_acted_on_at_once():
    words = set(words_of_thoughts(TOKENIZER))
    encoder = PromptEncoder(TOKENIZER, PromptTemplate.OPENVLA, Path("here"))
    generator = np.random.default_rng(0)
    for thing in THINGS:
        prompts = [encoder.encode(sentence(thing, "basket", generator, 0, 0.5)) for _ in range(40)]
        assert not words & {number for prompt in prompts for number in prompt}
    known = {TOKENIZER.id_to_token(number) for number in words}
    assert {" PLAN:", " MOVE:", "? ASSISTANT: TASK:", "\u2581[8,", "\u2581held"} <= known


def test_only_thoughts_refuses_what_would_change_the_rest():
    with pytest.raises(ConfigError, match="nothing else may change"):
        load_config(PolicyFitConfig, None, ["only_thoughts=true", "optimizer.weight_decay=0.1"])
    with pytest.raises(ConfigError, match="thinking_share must be above 0"):
        load_config(PolicyFitConfig, None, ["only_thoughts=true", "thinking_share=0"])


def test_only_thoughts_are_taught_to_nothing_but_a_policy(tmp_path):
    config = replace(fit_config(4), thinking_share=0.5, only_thoughts=True)
    with pytest.raises(DataError, match="give a warm start"):
        PolicyTrainer(config, CONFIG, made_up_samples(), TOKENIZER).run(tmp_path / "run")


def loss_of_thoughts(net: PolicyNet, samples: PolicySamples) -> float:
    return float(text_loss(*scores_of(net, samples, thinks=True)))


def test_a_killed_run_resumes_to_the_same_weights(tmp_path):
    samples = made_up_samples()
    whole = PolicyTrainer(fit_config(12, 4), CONFIG, samples, TOKENIZER).run(tmp_path / "whole")
    killed = PolicyTrainer(fit_config(12, 4), CONFIG, samples, TOKENIZER)
    original = killed._step

    def stop_at(step: int):
        if step == 7:
            raise KeyboardInterrupt
        return original(step)

    killed._step = stop_at  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        killed.run(tmp_path / "killed")
    resumed = PolicyTrainer(fit_config(12, 4), CONFIG, samples, TOKENIZER).run(tmp_path / "killed")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def test_a_deepened_policy_computes_what_the_shallow_one_did():
    deep = replace(SIZES, num_layers=5)
    words = TOKENIZER.get_vocab_size()
    shallow, grown = (
        PolicyNet(build_config(sizes, words, {"made-up": UNITS}), 2) for sizes in (SIZES, deep)
    )
    initialise(shallow, seed=3)
    grown.load_state_dict(deepened(shallow.state_dict(), deep.num_layers))
    pixels, ids, lengths = (
        torch.randn(4, 6, 16, 16),
        torch.arange(40).view(4, 10),
        torch.full((4,), 5),
    )
    with torch.no_grad():
        before, after = (net.read(net(pixels, ids, lengths, 4)).logits for net in (shallow, grown))
    assert torch.equal(before, after)


def test_padding_behind_a_shorter_answer_changes_nothing():
    net = PolicyNet(CONFIG, 2)
    initialise(net, 0)
    pixels, length = torch.randn(1, 6, 16, 16), torch.tensor([3])
    short = net(pixels, torch.tensor([[1, 5, 6, 7]]), length, 2)
    padded = net(pixels, torch.tensor([[1, 5, 6, 7, 0, 0, 0]]), length, 2)
    torch.testing.assert_close(short, padded)


def test_every_sample_comes_once_an_epoch():
    seen = np.concatenate([chosen_at(12, 4, seed=1, step=step) for step in range(3, 6)])
    assert sorted(seen) == list(range(12))


def test_soft_targets_stay_inside_the_action_range():
    targets = soft_tokens(torch.tensor([10, 15]), TokenRange(10, 19), 32, 2.0)
    torch.testing.assert_close(targets.sum(dim=-1), torch.ones(2))
    assert targets[:, :10].sum() == 0
    assert targets[:, 20:].sum() == 0
    assert targets[1].argmax() == 15


def test_near_misses_cost_less_than_far_ones_but_not_for_the_gripper():
    config = PolicyLossConfig(sigma_bins=2.0)
    labels = torch.full((1, 2), 15)

    def cost(guess: int, dim: int) -> float:
        logits = torch.zeros(1, 2, 32)
        logits[0, :, 15] = 4.0
        logits[0, dim] = 0.0
        logits[0, dim, guess] = 4.0
        return float(action_loss(logits, labels, torch.ones(1), TokenRange(10, 19), config))

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


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    """Once it went on to its end, and ended with success."""
    samples = made_up_samples()
    PolicyTrainer(fit_config(4, 4), CONFIG, samples, TOKENIZER).run(tmp_path / "run")
    saved = (tmp_path / "run" / STATE_FILE).read_bytes()
    broken = replace(samples, positions=np.full_like(samples.positions, np.nan))
    trainer = PolicyTrainer(fit_config(8, 4), CONFIG, broken, TOKENIZER)
    with pytest.raises(DivergedError, match="step 4"):
        trainer.run(tmp_path / "run")
    assert (tmp_path / "run" / STATE_FILE).read_bytes() == saved


@pytest.mark.parametrize("name", ["steps", "batch_size", "save_every", "log_every"])
def test_counts_below_one_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"'{name}': 0"):
        load_config(PolicyFitConfig, None, [f"{name}=0"])
