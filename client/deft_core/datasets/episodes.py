"""Episodes that somebody stored, whatever the format: the frames, what was asked, what was done.

`read_dataset` looks at a folder, finds out what it is and yields its episodes; steps are read when
they are iterated over, so that data sets larger than memory can be used. Everything that learns
from data, measures on data or compares with data takes it from here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from deft_core.errors import DeftError
from deft_core.types import Observation


class DatasetError(DeftError):
    """A data set that is not there, damaged, or of a form that is not read; the message says."""


class DemonstrationError(DatasetError):
    """A demonstration file is damaged, or was written in another format."""


@dataclass(frozen=True, eq=False)
class StoredStep:
    """One frame and what was done when it was seen, in the units that were stored.

    `is_example` is false where the action is none to learn from: a server intervened, or the
    demonstration failed.
    """

    observation: Observation
    action: NDArray[np.float64]  # [action_dim]
    statistics_key: str | None = None  # None: the data set does not say
    is_example: bool = True


@dataclass(frozen=True, eq=False)
class StoredEpisode:
    """An episode by name; `steps()` reads it from the start, each time it is called."""

    name: str
    steps: Callable[[], Iterator[StoredStep]]


def need(package: str) -> ModuleType:
    """Import a package of the extra `datasets`; DatasetError names it if it is missing."""
    try:
        return import_module(package)
    except ImportError as error:
        raise DatasetError(
            f"reading this data set needs {package.partition('.')[0]}: "
            "in a clone of Deft, pip install './client[datasets]'"
        ) from error


def pick_cameras(
    there: tuple[str, ...], wanted: Sequence[str], path: Path
) -> tuple[str, tuple[str, ...]]:
    """Which picture is the observation's own, and which go along; by default the only one."""
    if not there:
        raise DatasetError(f"{path}: no pictures in it, only numbers")
    if not wanted:
        if len(there) == 1:
            return there[0], ()
        raise DatasetError(
            f"{path}: has several cameras ({', '.join(there)}); say which one the policy looks "
            "through, and which go along, with --cameras"
        )
    unknown = set(wanted) - set(there)
    if unknown:
        raise DatasetError(
            f"{path}: no camera {', '.join(sorted(unknown))}; there are {', '.join(there)}"
        )
    return wanted[0], tuple(wanted[1:])
