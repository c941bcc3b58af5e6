"""What can go wrong around the simulator and an evaluation; every message says what to do.

SimulationError
├── UnknownSuiteError       no such suite; lists those there are
├── UnknownTaskError        no such task number in the suite
├── SimulatorMissingError   LIBERO, robosuite or MuJoCo is not installed
├── GraphicsError           no OpenGL library can render off screen; names the apt line
├── AssetsError             the assets folder is missing, incomplete or unreadable
├── UnstableError           the physics blew up; the episode says nothing about a policy
├── InitialStatesError      an initial-states file is damaged, or not what it should be
└── DemonstrationError      a demonstration file is damaged, or of another format version

EvaluationError
├── SelectionError          what was asked for cannot be evaluated, or not by this server
├── PeerAnswerError         a server of another project answered something that is no action
├── VideoError              an episode's video cannot be written
├── EvaluationStoppedError  the evaluation ended early; what was finished is on disk
└── ResultsError
    ├── ResultsMismatchError    the folder holds results of another run, version or options
    ├── ResultsDamagedError     a line that is no episode, or an episode twice
    ├── ResultsBusyError        another process is writing there
    └── ResultsWriteError       the disk refused; what was written before is intact
"""

from collections.abc import Iterable
from difflib import get_close_matches

from deft_client.errors import DeftError


class SimulationError(Exception):
    """Base class of what goes wrong in the simulator and around it."""


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


class EvaluationError(DeftError):
    """Base class of everything an evaluation raises on purpose."""


class SelectionError(EvaluationError):
    """What was asked for cannot be evaluated, or not by this server."""


class PeerAnswerError(EvaluationError):
    """A server of another project answered something that is no action."""


class VideoError(EvaluationError):
    """An episode's video cannot be written; the episode itself is not affected."""


class EvaluationStoppedError(EvaluationError):
    """The evaluation ended early; what was finished is on disk."""


class ResultsError(EvaluationError):
    """Base class of everything around result files."""


class ResultsMismatchError(ResultsError):
    """The folder holds results of another run, version or options."""


class ResultsDamagedError(ResultsError):
    """A line that is no episode, or an episode that is there twice."""


class ResultsBusyError(ResultsError):
    """Another process is writing to the same folder."""


class ResultsWriteError(ResultsError):
    """The disk refused to take a result; what was written before is intact."""
