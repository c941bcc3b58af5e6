"""Our own episodes as a data set: recordings of a server or a robot, and demonstrations."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from deft_client.datasets.demonstrations import find_demonstrations, load_demonstration
from deft_client.datasets.episodes import DatasetError, StoredEpisode, StoredStep
from deft_client.libero.errors import DemonstrationError
from deft_client.recordings import StepReader, find_episodes, read_header
from deft_client.types import Observation


def read_recordings(path: Path, cameras: Sequence[str]) -> Iterator[StoredEpisode]:
    """Yield recorded episodes, oldest first."""
    _refuse(cameras, path)
    for parts in find_parts(path):
        yield StoredEpisode(str(parts[0]), partial(_recorded, parts))


def find_parts(path: Path) -> list[list[Path]]:
    """The files of each recorded episode, oldest first; a long one has several."""
    episodes: list[list[Path]] = []
    latest: dict[str, list[Path]] = {}  # of each session; robots are recorded at the same time
    for file in find_episodes(path):
        header = read_header(file)
        if header.part == 0 or header.session_id not in latest:
            latest[header.session_id] = []
            episodes.append(latest[header.session_id])
        latest[header.session_id].append(file)
    return episodes


def read_demonstrations(path: Path, cameras: Sequence[str]) -> Iterator[StoredEpisode]:
    """Yield demonstrations by task and number; the actions are the expert's clean ones."""
    _refuse(cameras, path)
    for file in find_demonstrations(path):
        yield StoredEpisode(str(file), partial(_demonstrated, file))


def _refuse(cameras: Sequence[str], path: Path) -> None:
    if cameras:
        raise DatasetError(
            f"{path}: our own episodes say which picture is which; leave out --cameras"
        )


def _recorded(parts: Sequence[Path]) -> Iterator[StoredStep]:
    for path in parts:
        for step in StepReader(path):
            yield StoredStep(
                step.observation,
                step.chunk.actions[0],
                step.options.statistics_key,
                is_example=step.chunk.intervention is None,
            )


def _demonstrated(path: Path) -> Iterator[StoredStep]:
    try:
        shown = load_demonstration(path)
    except DemonstrationError as error:
        raise DatasetError(str(error)) from error
    for index, label in enumerate(shown.labels):
        observation = Observation(shown.frame(index), shown.header.instruction)
        action = label.astype(np.float64)
        yield StoredStep(observation, action, is_example=shown.header.succeeded)
