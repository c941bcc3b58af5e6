"""Which format a folder is in, found out by what lies in it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deft_client.datasets import own
from deft_client.datasets.episodes import DatasetError, StoredEpisode
from deft_client.datasets.lerobot import read_lerobot
from deft_client.datasets.libero_hdf5 import read_hdf5
from deft_client.datasets.rlds import find_versions, read_rlds
from deft_client.recordings import SUFFIX


@dataclass(frozen=True)
class DatasetFormat:
    """How a format is recognised and read."""

    name: str
    mark: str  # what lies in a folder of this format, for people
    matches: Callable[[Path], bool]
    read: Callable[[Path, Sequence[str]], Iterator[StoredEpisode]]


def _holds(pattern: str) -> Callable[[Path], bool]:
    return lambda path: path.is_dir() and next(path.glob(pattern), None) is not None


FORMATS = (
    DatasetFormat("LeRobot", "meta/info.json", _holds("meta/info.json"), read_lerobot),
    DatasetFormat("RLDS", "features.json", lambda path: bool(find_versions(path)), read_rlds),
    DatasetFormat(
        "demonstrations", "task00/*.npz", _holds("task*/episode*.npz"), own.read_demonstrations
    ),
    DatasetFormat(
        "recordings",
        f"*{SUFFIX}",
        lambda path: path.suffix == SUFFIX or _holds(f"**/*{SUFFIX}")(path),
        own.read_recordings,
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
