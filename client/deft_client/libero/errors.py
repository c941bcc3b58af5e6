"""What can go wrong around the simulator, as one small tree; every message says what to do.

SimulationError
├── UnknownSuiteError       no such suite; lists those there are
├── UnknownTaskError        no such task number in the suite
├── SimulatorMissingError   LIBERO, robosuite or MuJoCo is not installed
├── GraphicsError           no OpenGL library can render off screen; names the apt line
├── AssetsError             the assets folder is missing, incomplete or unreadable
├── UnstableError           the physics blew up; the episode says nothing about a policy
├── InitialStatesError      an initial-states file is damaged, or not what it should be
└── DemonstrationError      a demonstration file is damaged, or of another format version
"""

from collections.abc import Iterable
from difflib import get_close_matches


class SimulationError(Exception):
    """Base class of everything the LIBERO client raises on purpose."""


class UnknownSuiteError(SimulationError):
    """There is no suite of that name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = list(known)
        close = get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"unknown suite {name!r}; known suites: {', '.join(names)}.{hint}")


class UnknownTaskError(SimulationError):
    """The suite has no task of that number."""

    def __init__(self, suite: str, number: int, num_tasks: int) -> None:
        super().__init__(f"{suite} has tasks 0 to {num_tasks - 1}, got {number}")


class SimulatorMissingError(SimulationError):
    """LIBERO or something it stands on is not installed."""


class GraphicsError(SimulationError):
    """No OpenGL library on this machine can render off screen."""


class AssetsError(SimulationError):
    """The assets folder is missing, incomplete or unreadable."""


class UnstableError(SimulationError):
    """The physics blew up: numbers became infinite. The episode says nothing about a policy."""


class InitialStatesError(SimulationError):
    """An initial-states file is damaged, or holds something else than one float64 table."""


class DemonstrationError(SimulationError):
    """A demonstration file is damaged, or was written in another format."""
