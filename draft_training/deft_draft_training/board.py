"""TensorBoard files beside a run's metrics, for those who have it installed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from deft_draft_training.errors import ConfigError


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
