"""What can go wrong around the simulator and an evaluation; every message says what to do.

SelectionError              what was asked for cannot be evaluated, or not by this server
ResultsMismatchError        the folder holds results of another run, version or options
PlanError                   a plan that is wrong, not committed, changed, or played before
PeerAnswerError             a server of another project answered something that is no action

SimulationError
├── SimulatorMissingError   LIBERO, robosuite or MuJoCo is not installed
├── GraphicsError           no OpenGL library can render off screen; names the apt line
├── AssetsError             assets or initial states that are missing, incomplete or damaged
└── UnstableError           the physics blew up; the episode says nothing about a policy

EvaluationError
├── VideoError              an episode's video cannot be written
├── EvaluationStoppedError  the evaluation ended early; what was finished is on disk
└── ResultsError            results that are missing, damaged, or being written by another process
    └── ResultsWriteError       the disk refused; what was written before is intact
"""

from collections.abc import Iterator
from contextlib import contextmanager

from deft_core.errors import DeftError, UsageError


class SelectionError(UsageError):
    """What was asked for cannot be evaluated, or not by this server."""


class PlanError(UsageError):
    """A plan of held-out states is wrong, not committed, was changed, or was played before."""


class SimulationError(DeftError):
    """Base class of what goes wrong in the simulator and around it."""


class SimulatorMissingError(SimulationError):
    """LIBERO or something it stands on is not installed."""


class GraphicsError(SimulationError):
    """No OpenGL library on this machine can render off screen."""


class AssetsError(SimulationError):
    """Assets or initial states are missing, incomplete or damaged."""


class UnstableError(SimulationError):
    """The physics blew up: numbers became infinite. The episode says nothing about a policy."""


class EvaluationError(DeftError):
    """Base class of everything an evaluation raises on purpose."""


class PeerAnswerError(DeftError):
    """A server of another project answered something that is no action."""


class VideoError(EvaluationError):
    """An episode's video cannot be written; the episode itself is not affected."""


class EvaluationStoppedError(EvaluationError):
    """The evaluation ended early; what was finished is on disk."""


class ResultsError(EvaluationError):
    """Results are missing or damaged, or another process is writing them."""


class ResultsWriteError(ResultsError):
    """The disk refused to take a result; what was written before is intact."""


class ResultsMismatchError(UsageError):
    """The folder holds results of another run, version or options."""


@contextmanager
def needed(
    what: str, extra: str, error: type[EvaluationError] = EvaluationError, otherwise: str = ""
) -> Iterator[None]:
    """Around imports of an extra: say what to install where it is not there."""
    try:
        yield
    except ImportError as missing:
        install = f'in a clone of Deft, pip install "./client[{extra}]"'
        raise error(f"{what}: {install}{otherwise}") from missing
