"""A training run on disk: configuration, metrics and the state to resume from.

Everything is written beside its final name and then renamed, so that a killed run leaves either
the old state or the new one, never half of it.
"""

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from deft_client.files import replacing, write_atomically
from deft_draft_training.errors import ConfigError, ResumeError, StorageError


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Say which file could not be written, and that nothing is lost."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(
            f"{path} cannot be written: {reason}; what was there before is unchanged. Make room, "
            "and the same command goes on from there"
        ) from error


class Board(Protocol):
    """Where the numbers of a step are shown."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Show one number."""

    def flush(self) -> None:
        """Write what was shown so far."""


def open_board(directory: Path, first_step: int) -> Board:
    """Return a board that goes on at a step; what it showed of later ones is taken back."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "--tensorboard needs TensorBoard: pip install tensorboard, or leave the flag out "
            "and plot metrics.jsonl"
        ) from None
    board: Board = SummaryWriter(str(directory), purge_step=first_step)
    return board


def show(board: Board, step: int, values: Mapping[str, float]) -> None:
    """Show all numbers of a step."""
    for name, value in values.items():
        board.add_scalar(name, value, step)
    board.flush()


STATE_FILE = "state.pt"
_CONFIG, _METRICS = "config.json", "metrics.jsonl"


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come."""

    step: int = 0
    samples: int = 0


class RunDirectory:
    """Owns one directory; refuses one that another configuration wrote."""

    def __init__(self, path: Path, config: Mapping[str, Any], with_board: bool = False) -> None:
        self.path = path
        self._with_board = with_board
        self._board: Board | None = None
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
        stored = path / _CONFIG
        wanted = json.loads(json.dumps(config))
        if stored.exists():
            self._compare(json.loads(stored.read_text()), wanted)
        else:
            with explained(stored):
                write_atomically(stored, json.dumps(wanted, indent=2).encode())

    def _compare(self, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
        keys = [key for key in {*stored, *wanted} if stored.get(key) != wanted.get(key)]
        if keys:
            raise ResumeError(
                f"{self.path} was started with another configuration; these differ: "
                f"{', '.join(sorted(keys))}. Choose another directory, or remove this one"
            )

    def save(
        self,
        progress: RunProgress,
        module: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Store all that the next step depends on, random generators included."""
        state = {
            "step": progress.step,
            "samples": progress.samples,
            "module": module.state_dict(),
            "optimizers": [one.state_dict() for one in optimizers],
            "extra": dict(extra or {}),
            "torch_rng": torch.get_rng_state(),
            "numpy_rng": json.dumps(_numpy_state()),
            "python_rng": json.dumps(random.getstate()),
        }
        path = self.path / STATE_FILE
        with explained(path), replacing(path) as beside, beside.open("wb") as file:
            torch.save(state, file)

    def load(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> tuple[RunProgress, dict[str, Tensor]]:
        """Restore the newest state, or report that the run starts at step 0."""
        path = self.path / STATE_FILE
        if not path.exists():
            self._cut_metrics(0)  # of a run that ended before its first state
            self._open_board(1)
            return RunProgress(), {}
        state = torch.load(path, map_location="cpu", weights_only=True)
        module.load_state_dict(state["module"])
        for optimizer, stored in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        torch.set_rng_state(state["torch_rng"])
        _restore_numpy(json.loads(state["numpy_rng"]))
        version, internal, gauss = json.loads(state["python_rng"])
        random.setstate((version, tuple(internal), gauss))
        progress = RunProgress(state["step"], state["samples"])
        self._cut_metrics(progress.step)
        self._open_board(progress.step + 1)
        return progress, state["extra"]

    def _open_board(self, first_step: int) -> None:
        if self._with_board:
            self._board = open_board(self.path / "tensorboard", first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line of metrics."""
        path = self.path / _METRICS
        with explained(path), path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self._board is not None:
            show(self._board, step, values)

    def metrics(self) -> list[dict[str, float]]:
        """All whole lines written so far, in order."""
        path = self.path / _METRICS
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}\n")]

    def _cut_metrics(self, step: int) -> None:
        """Forget what a killed run logged after its last state: those steps happen again."""
        if not (self.path / _METRICS).exists():
            return
        kept = [json.dumps(line) for line in self.metrics() if line["step"] <= step]
        path = self.path / _METRICS
        with explained(path):
            write_atomically(path, "".join(f"{one}\n" for one in kept).encode())


def _numpy_state() -> list[Any]:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return [name, np.asarray(keys).tolist(), position, has_gauss, gauss]


def _restore_numpy(stored: list[Any]) -> None:
    name, keys, position, has_gauss, gauss = stored
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, gauss))
