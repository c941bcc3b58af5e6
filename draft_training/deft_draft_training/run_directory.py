"""A training run on disk: configuration, metrics and the state to resume from.

Everything is written to another name in the same folder and then renamed, so that a killed run
leaves either the old state or the new one, never half of it.
"""

import fcntl
import json
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from deft_core.files import replacing, write_atomically
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


def open_board(directory: Path, first_step: int) -> Any:
    """Return a writer that goes on at a step; what TensorBoard showed of later ones is void."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "--tensorboard needs TensorBoard: pip install tensorboard, or leave the flag out "
            "and plot metrics.jsonl"
        ) from None
    return SummaryWriter(str(directory), purge_step=first_step)


STATE_FILE, CONFIG_FILE, SPLIT_FILE = "state.pt", "config.json", "split.json"
_METRICS, _STEPS = "metrics.jsonl", "steps"
_MAY_CHANGE = {_STEPS, "save_every", "log_every"}  # what a run computes does not depend on them


def read_config(path: Path) -> dict[str, Any]:
    """The configuration that a run was started with; `ResumeError` where it cannot be read."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ResumeError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ResumeError(f"{path} is no configuration of a training")
    return config


def read_state(path: Path) -> dict[str, Any]:
    """The newest state of a run; `ResumeError` where it cannot be read."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise ResumeError(
            f"{path} is damaged: {str(error).splitlines()[0] if str(error) else 'it is cut off'}. "
            "Restore it from a copy, or remove it: then the training starts anew"
        ) from error
    if not isinstance(state, dict):
        raise ResumeError(f"{path} is no state of a training")
    return state


class RunDirectory:
    """Owns one directory until it is closed; refuses one that another configuration wrote.

    The number of steps may grow: the run goes on, on the schedule of its new length. How often it
    saves and logs may change. Of several processes of one training, one writes.
    """

    def __init__(
        self, path: Path, config: Mapping[str, Any], with_board: bool = False, writes: bool = True
    ) -> None:
        self.path, self.writes = path, writes
        self._with_board = with_board and writes
        self._board: Any = None
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path, os.O_RDONLY)
        try:
            if writes:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as long as we live
            self._settle(config)
        except BlockingIOError as error:
            self.close()
            raise ResumeError(
                f"another training is writing to {path}; wait for it, or choose another directory"
            ) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another training write here."""
        os.close(self._lock)

    def _settle(self, config: Mapping[str, Any]) -> None:
        path, new_config = self.path / CONFIG_FILE, json.loads(json.dumps(config))
        stored = read_config(path) if path.exists() else new_config
        keys = {key for key in {*stored, *new_config} if stored.get(key) != new_config.get(key)}
        if keys - _MAY_CHANGE or (_STEPS in keys and stored[_STEPS] > new_config[_STEPS]):
            raise ResumeError(
                f"{self.path} was started with another configuration; these differ: "
                f"{', '.join(sorted(keys))}. Choose another directory, or remove this one"
            )
        if keys or not path.exists():
            with explained(path):
                write_atomically(path, json.dumps(new_config, indent=2).encode())

    def save(
        self,
        step: int,
        module: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Store all that the next step depends on; what is random in it follows from its number."""
        state = {
            "step": step,
            "module": module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "extra": dict(extra or {}),
        }
        path = self.path / STATE_FILE
        with explained(path), replacing(path) as beside, beside.open("wb") as file:
            torch.save(state, file)

    def load(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> tuple[int, dict[str, Tensor]]:
        """Restore the newest state; how many steps were taken, 0 where there is none."""
        path, step, extra = self.path / STATE_FILE, 0, {}
        if path.exists():
            state = read_state(path)
            try:
                module.load_state_dict(state["module"])
                for optimizer, stored in zip(optimizers, state["optimizers"], strict=True):
                    optimizer.load_state_dict(stored)
                step, extra = state["step"], state["extra"]
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise ResumeError(f"{path} is of another training: {error}") from error
        self._cut_metrics(step)
        if self._with_board:
            self._board = open_board(self.path / "tensorboard", step + 1)
        return step, extra

    def keep_split(self, trained: Sequence[int], held_out: Sequence[int]) -> None:
        """Remember which episodes are trained on, for who evaluates."""
        if self.writes:
            split = {"trained": list(trained), "held_out": list(held_out)}
            with explained(self.path / SPLIT_FILE):
                write_atomically(self.path / SPLIT_FILE, json.dumps(split).encode())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line of metrics."""
        path = self.path / _METRICS
        with explained(path), path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()

    def metrics(self) -> list[dict[str, float]]:
        """All whole lines written so far, in order."""
        path = self.path / _METRICS
        try:
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            rows = [json.loads(line) for line in lines if line.endswith("}\n")]
        except (ValueError, RecursionError) as error:
            raise ResumeError(
                f"{path} cannot be read: {error}. Remove it: the training goes on from its state"
            ) from error
        return [line for line in rows if isinstance(line.get("step"), int)]

    def _cut_metrics(self, step: int) -> None:
        """Forget what a killed run logged after its last state: those steps happen again."""
        if not (self.path / _METRICS).exists():
            return
        lines = [json.dumps(line) for line in self.metrics() if line["step"] <= step]
        path = self.path / _METRICS
        with explained(path):
            write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
