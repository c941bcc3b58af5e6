"""Safetensors files are readable by whom any new file is; pickles hold weights or are refused."""

import io
import os
import pickle
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deft_policies.checkpoint.tensor_file import read_tensors, write_tensors
from deft_policies.errors import CheckpointError


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_tensor_file_gets_the_permissions_of_a_new_file(tmp_path, mask):
    before = os.umask(mask)
    turned = torch.arange(6.0).reshape(2, 3).T
    try:
        write_tensors({"a": turned}, tmp_path / "a.safetensors")
        (tmp_path / "plain").touch()
    finally:
        os.umask(before)
    mode = (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "a.safetensors").stat().st_mode == mode
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], turned)


class Program:
    """Unpickling it calls a function, here one that leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.mark),)


def write_code_beside_tensors(path: Path, mark: Path) -> None:
    torch.save({"a": torch.zeros(2), "b": Program(mark)}, path)


def write_code_in_old_format(path: Path, mark: Path) -> None:
    torch.save({"b": Program(mark)}, path, _use_new_zipfile_serialization=False)


def write_bare_pickle(path: Path, mark: Path) -> None:
    path.write_bytes(pickle.dumps(Program(mark)))


def write_code_as_a_tensor_function(path: Path, mark: Path) -> None:
    """The archive of honest weights, with another program in the place of theirs."""
    torch.save({"a": torch.zeros(2)}, path)
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            evil = pickle.dumps(OrderedDict(a=Program(mark)), protocol=2)
            archive.writestr(name, evil if name.endswith("data.pkl") else data)


def write_old_archive(path: Path, mark: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            data = pickle.dumps(Program(mark))
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


@pytest.mark.parametrize(
    "write",
    [
        write_code_beside_tensors,
        write_code_in_old_format,
        write_bare_pickle,
        write_code_as_a_tensor_function,
        write_old_archive,
    ],
)
def test_a_pickle_with_code_is_refused_and_nothing_runs(
    tmp_path: Path, write: Callable[[Path, Path], None]
) -> None:
    path, mark = tmp_path / "weights.pt", tmp_path / "mark"
    write(path, mark)
    with pytest.raises(CheckpointError, match="weights.pt cannot be read"):
        read_tensors(path)
    assert not mark.exists()


def test_code_in_such_a_pickle_would_run_elsewhere(tmp_path: Path) -> None:
    """So that the refusals above are not refusals of something harmless."""
    write_bare_pickle(tmp_path / "weights.pt", tmp_path / "mark")
    pickle.loads((tmp_path / "weights.pt").read_bytes())
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "content", [[torch.zeros(2)], {"a": {"b": torch.zeros(2)}}, {"a": 1.0}, {1: torch.zeros(2)}]
)
def test_a_pickle_must_hold_tensors_by_name(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="dictionary of tensors"):
        read_tensors(tmp_path / "weights.pt")


def test_a_damaged_file_is_refused_wherever_it_is_cut_or_changed(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.arange(40.0), "b": torch.ones(3)}, path)
    whole = path.read_bytes()
    for _ in range(60):
        place = int(torch.randint(len(whole), (1,), generator=generator))
        value = int(torch.randint(256, (1,), generator=generator))
        path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
        with suppress(CheckpointError):
            read_tensors(path)  # a changed number is still a number
        path.write_bytes(whole[:place])
        with pytest.raises(CheckpointError):
            read_tensors(path)
