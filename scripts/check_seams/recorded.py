"""Chunks that a policy answered to every frame of an episode, executed as a late answer has it."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deft_client.actions import ActionRules
from deft_client.chunks import ActionQueue, Moment, Seam, SeamSizes
from deft_client.types import ActionChunk


def load_chunks(path: Path) -> NDArray[np.float64]:
    """Read `chunks` [frame, step, action_dim] of an .npz."""
    with np.load(path) as arrays:
        chunks: NDArray[np.float64] = arrays["chunks"].astype(np.float64)
    return chunks


def replay(
    chunks: NDArray[np.float64], rules: ActionRules, seam: Seam, delay_periods: int
) -> SeamSizes:
    """Execute them in order, each `delay_periods` after its frame. Nothing moves the frames."""
    queue = ActionQueue(rules, seam)
    asked: Moment | None = None
    for period in range(len(chunks)):
        if asked is not None and period - asked.periods >= delay_periods:
            queue.refill(ActionChunk(chunks[asked.periods]), asked)
            asked = None
        if asked is None and queue.is_due:
            asked = queue.now
        queue.next()
    return queue.seams
