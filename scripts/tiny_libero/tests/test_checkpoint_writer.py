"""Checkpoints as training writes them: read back whole, or not there at all."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deft_policies.checkpoint.config import load_config, load_tokenizer
from deft_policies.errors import CheckpointError
from deft_policies.model.sizes import OpenVLAConfig, ResizeStrategy, TrainingNotes
from tests import golden
from tests.policies.checkpoint.checkpoint_files import (
    loaded_tensors,
    open_checkpoint,
    random_tensors,
    slow_tensors,
    v01_config,
    write_tiny,
)
from tests.tiny_openvla import tiny_config
from tiny_libero_recipe.checkpoint_writer import write_checkpoint
from tiny_libero_recipe.tokenizer import build_tokenizer


def test_written_checkpoints_are_read_back(tmp_path: Path) -> None:
    tensors = write_tiny(tmp_path / "model")
    loaded = loaded_tensors(tmp_path / "model")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in loaded.items())


@pytest.mark.parametrize("config", [tiny_config(num_kv_heads=2), v01_config()])
def test_a_written_configuration_is_read_back(tmp_path: Path, config: OpenVLAConfig) -> None:
    write_tiny(tmp_path / "model", config)
    again = load_config(tmp_path / "model")
    assert (again.llm, again.towers, again.action_tokens) == (
        config.llm,
        config.towers,
        config.action_tokens,
    )
    assert again.prompt_template is config.prompt_template
    assert again.image.normalizations == config.image.normalizations
    assert (again.image.size, again.image.is_stretched) == (28, True)
    for key, statistics in config.statistics.items():
        assert again.statistics[key].low.tobytes() == statistics.low.tobytes()
        assert again.statistics[key].high.tobytes() == statistics.high.tobytes()
        assert again.statistics[key].mask.tolist() == statistics.mask.tolist()


def test_letterboxing_survives_writing(tmp_path: Path) -> None:
    config = tiny_config()
    image = replace(
        config.image,
        resize=ResizeStrategy.LETTERBOX,
        is_stretched=False,
        letterbox_fill=(1, 2, 3),
    )
    write_tiny(tmp_path / "model", replace(config, image=image))
    assert load_config(tmp_path / "model").image == image


def test_what_was_noted_of_the_training_stays_with_the_weights(tmp_path: Path) -> None:
    training = TrainingNotes(
        ("lift the cup", "把杯子放到桌上"),
        "real 4a83e826",
        ("openvla", "ecot"),
        {"libero_object": "30-39"},
    )
    write_tiny(tmp_path / "model", replace(tiny_config(), training=training))
    assert load_config(tmp_path / "model").training == training
    write_tiny(tmp_path / "other", tiny_config())
    assert load_config(tmp_path / "other").training == TrainingNotes()


@pytest.mark.parametrize("text", ["{", '{"a": 1}', '{"instructions": [1]}', "[1]"])
def test_notes_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    write_tiny(tmp_path / "model", tiny_config())
    (tmp_path / "model" / "training.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"training.json"):
        load_config(tmp_path / "model")


def test_the_golden_checkpoint_survives_writing(tmp_path: Path) -> None:
    config = load_config(golden.TINY_OPENVLA)
    tensors = slow_tensors(golden.TINY_OPENVLA / "model.safetensors")
    write_checkpoint(tmp_path / "copy", config, tensors, load_tokenizer(golden.TINY_OPENVLA))
    checkpoint = open_checkpoint(str(tmp_path / "copy"))
    assert checkpoint.config.llm == config.llm
    assert checkpoint.config.towers == config.towers
    for case in golden.prompts():
        assert case.template == "v01" or checkpoint.encoder.encode_text(case.prompt) == (
            case.model_ids
        )
    copied = slow_tensors(tmp_path / "copy" / "model.safetensors")
    assert all(torch.equal(copied[name], tensor) for name, tensor in tensors.items())


def test_writing_never_touches_what_is_there(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="exists already"):
        write_tiny(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_writing_refuses_tensors_that_do_not_fit(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    tensors.pop("projector.fc1.weight")
    with pytest.raises(CheckpointError, match=r"1 missing: projector\.fc1\.weight"):
        write_checkpoint(tmp_path / "model", tiny_config(), tensors, build_tokenizer(["go"]))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    """A tokenizer that cannot be saved stands for a disk that is full."""
    with pytest.raises(AttributeError):
        write_checkpoint(
            tmp_path / "model",
            tiny_config(),
            random_tensors(tiny_config()),
            None,  # type: ignore[arg-type]
        )
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="not be written"):
        write_tiny(tmp_path / "file" / "model")
