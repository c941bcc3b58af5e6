"""`deft convert` as its user calls it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deft_policies.checkpoint.tensor_file import read_tensors
from deft_server.__main__ import main as deft
from tests import golden_oft


def write_variant(tmp_path: Path, name: str) -> Path:
    return golden_oft.variants()[name].write(tmp_path / name)


def test_pickled_files_become_safetensors_with_the_same_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_variant(tmp_path, "film_2img_proprio")
    pickles = sorted(directory.glob("*.pt"))
    assert len(pickles) == 3
    assert deft(["convert", str(directory)]) == 0
    for path in pickles:
        before, after = read_tensors(path), load_file(path.with_suffix(".safetensors"))
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert tensor.dtype == after[name].dtype
            assert torch.equal(tensor, after[name])
    assert "action_head--100000_checkpoint.safetensors: 16 tensors" in capsys.readouterr().out
    assert not list(directory.glob("*.partial"))


def test_a_folder_without_pickles_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deft(["convert", str(tmp_path)]) == 1
    assert f"{tmp_path} holds no *checkpoint*.pt" in capsys.readouterr().err
