"""A small VLA-0 is taught here: its labels, its text, and the folder that is served."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from deft_core.types import Observation
from deft_draft_training.errors import ConfigError
from deft_policies.decoding.clock import StageClock
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.families.vla0.model import Vla0, read_numbers_text, to_actions
from deft_policies.families.vla0.prompt import prompt_text
from deft_policies.families.vla0.run_folder import read_run
from deft_policies.model.formats import Precision
from tests.demonstrations import write_demonstrations
from tests.typed import next_command
from tiny_libero_recipe.data import AugmentConfig
from tiny_libero_recipe.episodes import load_demonstrations
from tiny_libero_recipe.number_fit import NumberFitConfig, NumberTrainer
from tiny_libero_recipe.number_model import NumberModelConfig
from tiny_libero_recipe.number_samples import prepare_numbers, write_numbers
from tiny_libero_recipe.numbers import (
    NUM_BINS,
    STOP,
    chunks,
    repeated_share,
    spelling_table,
    to_numbers,
)

SIZES = NumberModelConfig(16, 2, 2, 24, 32, 2, 2, 1, 48)
CONFIG = NumberFitConfig(model=SIZES, augment=AugmentConfig(0, 0, 0, 0), steps=2, batch_size=4)
ENDS = (np.array([-1.0, 0.0]), np.array([1.0, 5.0]))


@pytest.fixture
def demos(tmp_path: Path) -> Path:
    return write_demonstrations(tmp_path / "demos", episodes=2)


@pytest.fixture
def train(demos: Path, teach: Callable[..., Path]) -> Callable[..., Path]:
    return partial(teach, demos, answers="numbers", sizes=asdict(SIZES))


def test_labels_keep_all_of_0_to_1000():
    values = np.linspace(-1, 1, NUM_BINS + 1)
    numbers = to_numbers(np.stack([values, 5 * np.ones_like(values)], axis=1), *ENDS)
    assert numbers[:, 0].tolist() == list(range(NUM_BINS + 1))
    assert set(numbers[:, 1]) == {NUM_BINS}


def test_a_chunk_is_the_next_steps_and_the_last_one_again():
    actions = np.arange(10.0)[:, None]
    found = chunks(actions)[..., 0]
    assert found[0].tolist() == list(range(8))
    assert found[8].tolist() == [8, 9, 9, 9, 9, 9, 9, 9]


def test_the_share_of_repeated_numbers_is_counted_within_episodes():
    first, second = np.array([[1, 5], [1, 6], [2, 6]]), np.array([[2, 7], [2, 7]])
    assert repeated_share([first, second]).tolist() == [2 / 3, 2 / 3]


def test_a_number_is_spelt_exactly_where_nothing_near_it_counts():
    table = spelling_table(0.0)
    for number in (0, 7, 42, 999, 1000):
        digits = [int(one) for one in str(number)]
        wanted = torch.eye(STOP + 1)[[*digits, STOP]]
        assert torch.equal(table[number, : len(digits) + 1], wanted)
        assert table[number, len(digits) + 1 :].sum() == 0


def test_digits_are_weighed_by_the_numbers_they_lead_to():
    table = spelling_table(2.0)
    weights = {one: np.exp(-0.5 * ((one - 100) / 2) ** 2) for one in range(NUM_BINS + 1)}
    total = sum(weights.values())
    first = dict.fromkeys("0123456789", 0.0)
    for number, weight in weights.items():
        first[str(number)[0]] += weight / total
    assert table[100, 0].tolist() == pytest.approx([*first.values(), 0.0], abs=1e-6)
    assert table[100, 0, 9] > 0.3  # 98 and 99 are near
    # After 1 0 0 the number has ended, or it is 1000, which is far.
    assert table[100, 3, STOP] == pytest.approx(1.0)


def test_an_answer_is_read_as_the_labels_it_was_made_of(demos: Path):
    prepared = prepare_numbers(load_demonstrations([demos], only_succeeded=True))
    batches = NumberTrainer(CONFIG, prepared.run, prepared.samples, prepared.tokenizer)._batches
    for labels in prepared.samples.labels:
        tokens, targets = batches.spell(labels, is_whole=True)
        text = "".join("0123456789 "[one] for one in tokens[:-1])
        assert read_numbers_text(text, has_ended=True, run=prepared.run) == labels.tolist()
        assert (targets[np.arange(len(tokens)), tokens] > 0).all()
        np.testing.assert_allclose(targets.sum(axis=1), 1, rtol=1e-6)
        first, _ = batches.spell(labels, is_whole=False)
        assert first[:-1].tolist() == tokens[: len(first) - 1].tolist()


def test_numbers_stand_for_what_the_expert_commanded(demos: Path):
    (episode, *_) = load_demonstrations([demos], only_succeeded=True)
    prepared = prepare_numbers([episode])
    actions = to_actions(prepared.samples.labels[0].tolist(), prepared.run)[0]
    near = (prepared.run.highest - prepared.run.lowest) / NUM_BINS
    assert (np.abs(actions - episode.labels[0])[:6] <= near[:6]).all()
    assert actions[6] == (-1.0 if episode.labels[0, 6] > 0.5 else 1.0)  # -1 opens


def test_prompts_are_word_for_word_and_a_few_tokens_long(demos: Path):
    prepared = prepare_numbers(load_demonstrations([demos], only_succeeded=True))
    asked = "pick up the milk and place it in the basket"
    text = prompt_text(prepared.run, asked)
    ids = prepared.tokenizer.encode(text, add_special_tokens=False).ids
    assert prepared.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(ids) == 5 + len(asked.split())
    odd = prepared.tokenizer.encode("grüße 12", add_special_tokens=False).ids
    assert prepared.tokenizer.decode(odd) == "grüße 12"


def test_what_was_taught_is_served_as_it_was_taught(demos: Path, tmp_path: Path):
    episodes = load_demonstrations([demos], only_succeeded=True)
    prepared = prepare_numbers(episodes)
    trainer = NumberTrainer(CONFIG, prepared.run, prepared.samples, prepared.tokenizer)
    net = trainer.run(tmp_path / "run")
    write_numbers(net, prepared, tmp_path / "taught", torch.float32)
    served_as = ModelOptions(checkpoint=str(tmp_path / "taught"), precision=Precision.FLOAT32)
    policy = load_policy(served_as)
    assert isinstance(policy, VlaPolicy)
    assert policy.info.held_out == {episodes[0].header.suite: "30-39"}
    model = policy.model
    assert isinstance(model, Vla0)

    asked = episodes[0].header.instruction
    unworded = replace(CONFIG, words=replace(CONFIG.words, plain=1.0, noise=0.0), never_hidden=1.0)
    batches = NumberTrainer(unworded, prepared.run, prepared.samples, prepared.tokenizer)._batches
    batch = batches.take(np.array([0]), np.random.default_rng(0), True)
    with torch.no_grad():
        hidden = net(
            trainer._look(batch.frames), prepared.run.grid, batch.ids, batch.prompt_lengths, 1
        )
        taught = net.decoder.head(hidden)[0, 0, list(model.network.config.answer_ids)]
        frame = Observation(batch.frames[0].numpy(), asked)
        (prompt,) = model.see([frame], StageClock(torch.device("cpu")))
        served = model.network.decoder(prompt.embeds[None])[0, -1]
        torch.testing.assert_close(model.network.decoder.head(served), taught)


def test_the_command_says_how_much_repeats_and_how_to_serve(
    demos: Path, train: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    checkpoint = train("first")
    told = capsys.readouterr()
    assert "so many are the same in the next frame, by dimension: " in told.err
    assert next_command(told.out) == [
        *("deft", "serve", "--family", "vla0", "--checkpoint", str(checkpoint))
    ]


def test_another_run_goes_on_with_the_same_range_and_words(demos: Path, train: Callable[..., Path]):
    first = train("first")
    flags = [f"--warm-start={demos.parent / 'first'}", f"--tokens-of={first}"]
    second = train("second", *flags, "--set=fit.model.num_layers=3")
    for name in ("dataset_stats.json", "model_last/tokenizer.json"):
        assert (second / name).read_bytes() == (first / name).read_bytes()
    assert read_run(second).lowest.tolist() == read_run(first).lowest.tolist()
    with pytest.raises(ConfigError, match="never overwritten"):
        train("second")
