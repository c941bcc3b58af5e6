"""Which format a folder is in, found out by what lies in it; and our own episodes as a data set."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from deft_core.datasets.demonstrations import find_demonstrations, load_demonstration
from deft_core.datasets.episodes import DatasetError, StoredEpisode, StoredStep
from deft_core.datasets.lerobot import read_lerobot
from deft_core.datasets.libero_hdf5 import read_hdf5
from deft_core.datasets.rlds import find_versions, read_rlds
from deft_core.recordings import SUFFIX, StepReader, find_episodes, read_header
from deft_core.types import Observation


@dataclass(frozen=True)
class DatasetFormat:
    """How a format is recognised and read."""

    name: str
    mark: str  # what lies in a folder of this format, for people
    matches: Callable[[Path], bool]
    read: Callable[[Path, Sequence[str]], Iterator[StoredEpisode]]


def _holds(pattern: str) -> Callable[[Path], bool]:
    return lambda path: path.is_dir() and next(path.glob(pattern), None) is not None


def read_recordings(path: Path, cameras: Sequence[str]) -> Iterator[StoredEpisode]:
    """Yield recorded episodes, oldest first."""
    _refuse(cameras, path)
    for parts in find_parts(path):
        yield StoredEpisode(str(parts[0]), partial(_recorded, parts))


def find_parts(path: Path) -> list[list[Path]]:
    """The files of each recorded episode, oldest first; a long one has several."""
    episodes: list[list[Path]] = []
    # Of each caller's session: robots are recorded at the same time.
    latest: dict[tuple[str, str], list[Path]] = {}
    for file in find_episodes(path):
        header = read_header(file)
        whose = header.caller, header.session_id
        if header.part == 0 or whose not in latest:
            latest[whose] = []
            episodes.append(latest[whose])
        latest[whose].append(file)
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
    shown = load_demonstration(path)
    for index, label in enumerate(shown.labels):
        instruction, state = shown.header.instruction, shown.state[index]
        observation = Observation(shown.frame(index), instruction, state=state)
        action = label.astype(np.float64)
        yield StoredStep(observation, action, is_example=shown.header.succeeded)


FORMATS = (
    DatasetFormat("LeRobot", "meta/info.json", _holds("meta/info.json"), read_lerobot),
    DatasetFormat("RLDS", "features.json", lambda path: bool(find_versions(path)), read_rlds),
    DatasetFormat(
        "demonstrations", "task00/*.npz", _holds("task*/episode*.npz"), read_demonstrations
    ),
    DatasetFormat(
        "recordings",
        f"*{SUFFIX}",
        lambda path: path.suffix == SUFFIX or _holds(f"**/*{SUFFIX}")(path),
        read_recordings,
    ),
    DatasetFormat(
        "LIBERO's HDF5",
        "*.hdf5",
        lambda path: path.suffix == ".hdf5" or _holds("**/*.hdf5")(path),
        read_hdf5,
    ),
)


def read_dataset(path: Path, cameras: Sequence[str] = ()) -> Iterator[StoredEpisode]:
    """Yield the episodes of a folder or file, in a fixed order; DatasetError if it is none.

    `cameras` are its pictures by their names there: the first is the observation's own, the others
    go along as further views. None takes the one camera that is there, or the format's usual one.
    """
    return find_format(path).read(path, cameras)


def find_format(path: Path) -> DatasetFormat:
    """What a folder or file is; DatasetError if it is nothing known."""
    if not path.exists():
        raise DatasetError(f"{path}: no such file or folder")
    found = next((one for one in FORMATS if one.matches(path)), None)
    if found is None:
        known = "; ".join(f"{one.name} ({one.mark})" for one in FORMATS)
        raise DatasetError(f"{path}: no data set that is known here. Known are: {known}")
    return found
