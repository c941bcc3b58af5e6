"""A run shows its numbers in TensorBoard where one is installed, and says so where none is."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from deft_draft_training.errors import ConfigError
from deft_draft_training.run_directory import RunDirectory

MODULE = "torch.utils.tensorboard"


class Writer:
    """Stands in for TensorBoard's writer."""

    opened: list["Writer"] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.shown: list[tuple[str, float, int]] = []
        self.opened.append(self)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.shown.append((tag, scalar_value, global_step))

    def flush(self) -> None:
        pass


def test_a_resumed_run_goes_on_in_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(SummaryWriter=Writer))
    module = nn.Linear(2, 2)
    with RunDirectory(tmp_path, {}, with_board=True) as first:
        first.load(module, [])
        first.log(3, {"loss": 0.5, "norm": 2.0})
        first.save(3, module, [])
    with RunDirectory(tmp_path, {}, with_board=True) as second:
        second.load(module, [])
    begun, resumed = Writer.opened
    assert begun.shown == [("loss", 0.5, 3), ("norm", 2.0, 3)]
    assert (begun.purge_step, resumed.purge_step) == (1, 4)
    assert begun.folder == resumed.folder == str(tmp_path / "tensorboard")


def test_without_tensorboard_the_flag_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, MODULE, None)
    refused = pytest.raises(ConfigError, match="pip install tensorboard")
    with RunDirectory(tmp_path, {}, with_board=True) as run, refused:
        run.load(nn.Linear(2, 2), [])
