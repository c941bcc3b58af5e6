"""Our own episodes as a data set: recordings of a server or a robot, and demonstrations."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from deft_client.datasets.episodes import DatasetOptions, StoredEpisode, StoredStep
from deft_client.libero.demonstrations.files import find_demonstrations, load_demonstration
from deft_client.recordings import find_episodes, iterate_steps
from deft_client.types import Observation


def read_recordings(path: Path, options: DatasetOptions) -> Iterator[StoredEpisode]:
    """Yield recorded episodes, oldest first."""
    for file in find_episodes(path):
        yield StoredEpisode(str(file), partial(_recorded, file, options.statistics_key))


def read_demonstrations(path: Path, options: DatasetOptions) -> Iterator[StoredEpisode]:
    """Yield demonstrations that succeeded, by task and number; the actions are the clean ones."""
    for file in find_demonstrations(path):
        yield StoredEpisode(str(file), partial(_demonstrated, file, options.statistics_key))


def _recorded(path: Path, statistics_key: str | None) -> Iterator[StoredStep]:
    for step in iterate_steps(path):
        yield StoredStep(
            step.observation,
            step.chunk.actions[0],
            step.options.statistics_key or statistics_key,
            is_answer=step.chunk.intervention is None,
        )


def _demonstrated(path: Path, statistics_key: str | None) -> Iterator[StoredStep]:
    shown = load_demonstration(path)
    if not shown.header.succeeded:
        return
    for index, label in enumerate(shown.labels):
        observation = Observation(shown.frame(index), shown.header.instruction)
        yield StoredStep(observation, label.astype(np.float64), statistics_key)
