"""What the evaluation and its worker processes tell each other, and what a worker is told first."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from deft_client.libero.evaluation.simulators import LIBERO
from deft_client.libero.policies.source import PolicySource
from deft_client.libero.results.records import EpisodeKey, EpisodeRecord
from deft_client.libero.simulator.environment import EnvironmentSettings


class Pacing(Enum):
    """Whether the simulator waits for answers."""

    LOCK_STEP = "lock-step"
    REAL_TIME = "real-time"


class VideoChoice(Enum):
    """Of which episodes a video is kept."""

    ALL = "all"
    FAILURES = "failures"  # whatever did not succeed
    NONE = "none"


@dataclass(frozen=True)
class WorkerSettings:
    """How every episode of a run is played."""

    folder: Path  # of the run; videos and logs go there
    source: PolicySource
    simulator: str = LIBERO
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    pacing: Pacing = Pacing.LOCK_STEP
    step_limit: int = 0
    executed_steps: int | None = None
    seed: int = 7
    video: VideoChoice = VideoChoice.NONE


@dataclass(frozen=True)
class Job:
    """Play this episode."""

    key: EpisodeKey


@dataclass(frozen=True)
class Heartbeat:
    """The worker is alive and has come this far in its episode."""

    num_steps: int
    round_trip_ms: float  # of the newest answer


@dataclass(frozen=True)
class Finished:
    """The episode Succeeded or Failed."""

    record: EpisodeRecord


@dataclass(frozen=True)
class ServerTrouble:
    """The server did not answer; `record` is what to keep if it never does (Errored)."""

    record: EpisodeRecord


@dataclass(frozen=True)
class Hopeless:
    """No episode can be played: the simulator does not open, or the server refuses our kind."""

    reason: str


@dataclass(frozen=True)
class Warned:
    """Something the person at the terminal should know."""

    text: str


Report = Heartbeat | Finished | ServerTrouble | Hopeless | Warned
