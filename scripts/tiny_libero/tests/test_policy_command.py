"""Training a small policy goes on from another run, also where a new task has joined."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deft_core.datasets.demonstrations import (
    COLUMNS,
    PRIVILEGED,
    find_demonstrations,
    load_demonstration,
)
from deft_core.types import Observation
from deft_draft_training.errors import ConfigError, DataError
from deft_policies.base import PolicyRequest
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from tests.demonstrations import INSTRUCTIONS, write_demonstrations
from tests.typed import next_command
from tiny_libero_recipe.train import decided, entropy_of_motion, main

SMALL = {
    "image_size": 32,
    "patch_size": 16,
    "tower_width": 16,
    "tower_depth": 2,
    "tower_heads": 2,
    "tower_mlp": 32,
    "width": 32,
    "num_layers": 2,
    "heads": 2,
    "mlp": 48,
}
KEPT = ("tokenizer.json", "dataset_statistics.json")


def train(demos: Sequence[Path], name: str, *flags: str) -> Path:
    """Train for two steps in the folder of the first demonstrations; return the checkpoint."""
    folder = demos[0].parent
    sizes = [f"--set=fit.model.{key}={value}" for key, value in SMALL.items()]
    settings = ["--set=fit.steps=2", "--set=fit.batch_size=4", "--threads=1", *sizes]
    settings += ["--set=fit.thinking_share=0"]  # these say nothing of what was asked for
    where = [f"--run={folder / name}", f"--out={folder / f'{name}-checkpoint'}"]
    assert main([*map(str, demos), *where, *settings, *flags]) == 0
    return folder / f"{name}-checkpoint"


@pytest.fixture
def demos(tmp_path: Path) -> Path:
    return write_demonstrations(tmp_path / "demos", episodes=2)


@pytest.fixture
def of_a_new_task(tmp_path: Path) -> Path:
    return write_demonstrations(tmp_path / "new", episodes=2, instructions=["lift the milk, quick"])


def test_a_new_task_joins_without_a_change_of_tokens(demos: Path, of_a_new_task: Path):
    first = train([demos], "first")
    flags = [f"--warm-start={demos.parent / 'first'}", f"--tokens-of={first}"]
    second = train([demos, of_a_new_task], "second", *flags)
    for name in KEPT:
        assert (second / name).read_bytes() == (first / name).read_bytes()
    options = ModelOptions(checkpoint=str(second), statistics_key="libero_object")
    frame = Observation(np.zeros((32, 32, 3), np.uint8), "lift the milk, quick")
    policy = load_policy(options)
    assert policy.info.instructions == ("lift the milk, quick", *sorted(INSTRUCTIONS))
    assert policy.info.assets == "none"
    (answer,) = policy.act([PolicyRequest(frame)])
    chunk = answer.chunk
    assert chunk.actions.shape == (1, 7)


def test_training_says_how_much_the_labels_of_each_direction_hold(
    demos: Path, capsys: pytest.CaptureFixture[str]
):
    train([demos], "first")
    assert "bits of entropy in what moves, by direction: x " in capsys.readouterr().err


def test_entropy_counts_the_tokens_of_steps_that_move():
    tokens = np.array([[1, 7], [2, 7], [3, 7], [4, 7], [9, 7], [9, 7]])
    labels = np.array([[0.5], [0.5], [-0.5], [0.1], [0.0], [0.01]], np.float32)
    labels = np.concatenate([labels, np.ones((6, 1), np.float32)], axis=1)
    assert entropy_of_motion(tokens, labels).tolist() == [2.0]
    assert entropy_of_motion(tokens * 0, labels).tolist() == [0.0]


def test_training_ends_with_the_command_that_serves_what_was_trained(
    demos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = train([demos], "first")
    served = ["--checkpoint", str(checkpoint), "--statistics-key", "libero_object"]
    assert next_command(capsys.readouterr().out) == ["deft", "serve", *served]


def test_a_warm_start_must_say_whose_tokens_it_keeps(demos: Path):
    with pytest.raises(ConfigError, match="--tokens-of"):
        train([demos], "second", f"--warm-start={demos}")


def test_a_warm_start_of_another_size_is_refused(demos: Path):
    first = train([demos], "first")
    flags = [f"--warm-start={demos.parent / 'first'}", f"--tokens-of={first}"]
    with pytest.raises(DataError, match=r"first is of another shape in"):
        train([demos], "second", *flags, "--set=fit.model.num_layers=1")


def test_a_warm_start_may_come_from_a_shallower_decoder(demos: Path):
    first = train([demos], "first")
    flags = [f"--warm-start={demos.parent / 'first'}", f"--tokens-of={first}"]
    second = train([demos], "second", *flags, "--set=fit.model.num_layers=3")
    sizes = json.loads((second / "config.json").read_text())["text_config"]
    assert sizes["num_hidden_layers"] == 3


def test_a_warm_start_may_come_from_a_checkpoint(demos: Path):
    first = train([demos], "first", "--float32")
    second = train(
        [demos],
        "second",
        f"--warm-start={first}",
        f"--tokens-of={first}",
        "--set=fit.optimizer.rate=0",
        "--set=fit.optimizer.muon_rate=0",
        "--float32",
    )
    model = "model.safetensors"
    assert (second / model).read_bytes() == (first / model).read_bytes()
    with pytest.raises(DataError, match="of another shape"):
        train(
            [demos],
            "third",
            f"--warm-start={first}",
            f"--tokens-of={first}",
            "--set=fit.model.width=48",
            "--set=fit.model.heads=2",
        )


def test_only_an_open_hand_that_rises_close_to_the_thing_is_left_out(demos: Path):
    episode = load_demonstration(next(find_demonstrations(demos)))
    phases = ("approach", "lift")
    episode = replace(episode, header=replace(episode.header, phases=phases))
    steps = {
        name: np.zeros((6, *getattr(episode, name).shape[1:]), kind)
        for name, kind in COLUMNS.items()
    }
    away, opening = PRIVILEGED.index("gripper_x"), PRIVILEGED.index("opening")
    steps["privileged"][:, opening] = 0.08
    steps["labels"][:, 2] = 0.5
    steps["phase"][:] = phases.index("approach")
    steps["labels"][0, 2] = -0.5  # goes down
    steps["privileged"][1, away] = 0.1  # is still far away
    steps["privileged"][2, opening] = 0.0  # has closed on nothing
    steps["phase"][3] = phases.index("lift")
    pictures = [bytes([step]) for step in range(6)]
    kept = decided(replace(episode, encoded=pictures, **steps))
    assert list(kept.encoded) == pictures[:4]
    for name, rows in steps.items():
        assert np.array_equal(getattr(kept, name), rows[:4])


def test_a_warm_start_from_no_run_is_refused(demos: Path):
    first = train([demos], "first")
    with pytest.raises(DataError, match=r"state\.pt is missing"):
        train([demos], "second", f"--warm-start={demos}", f"--tokens-of={first}")
