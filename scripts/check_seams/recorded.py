"""Chunks that a policy answered to every frame of an episode, executed as a late answer has it."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deft_client.chunks import ActionQueue, Seam
from deft_client.libero.evaluation.episode import largest_change
from deft_client.libero.results.records import SeamSizes
from deft_client.libero.simulator import conventions
from deft_client.types import ActionChunk


def load_chunks(path: Path) -> NDArray[np.float64]:
    """Read `chunks` [frame, step, action_dim] of an .npz."""
    with np.load(path) as arrays:
        chunks: NDArray[np.float64] = arrays["chunks"].astype(np.float64)
    return chunks


def replay(chunks: NDArray[np.float64], seam: Seam, delay_periods: int) -> SeamSizes:
    """Execute them in order, each `delay_periods` after its frame. Nothing moves the frames."""
    queue = ActionQueue(conventions.ACTION_RULES, seam)
    asked: int | None = None
    actions = []  # since the last hold
    commanded = inside = 0.0
    for period in range(len(chunks)):
        if asked is not None and period - asked >= delay_periods:
            queue.refill(ActionChunk(chunks[asked]))
            inside, asked = max(inside, largest_change(chunks[asked])), None
        if asked is None and queue.is_due:
            queue.ask()
            asked = period
        action = queue.next()
        actions = [] if action is None else [*actions, action][-2:]
        if len(actions) == 2:
            commanded = max(commanded, largest_change(np.stack(actions)))
    return SeamSizes(commanded, inside)
