"""Plays episodes inside a worker process: what it is told, and what it reports back."""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np

from deft_client.chunks import Seam
from deft_client.errors import (
    AccessDeniedError,
    ConflictError,
    DeftError,
    RefusedRequestError,
    UnknownEndpointError,
)
from deft_client.libero.errors import EvaluationError, PeerAnswerError, SimulationError, VideoError
from deft_client.libero.evaluation import selection
from deft_client.libero.evaluation.episode import (
    EpisodeLog,
    EpisodePlan,
    EpisodePolicy,
    RealTimePlayer,
    play_in_lock_step,
)
from deft_client.libero.evaluation.selection import LIBERO
from deft_client.libero.evaluation.video import Caption, write_video
from deft_client.libero.policies.source import PolicySource, build_policy
from deft_client.libero.results.records import EpisodeRecord, Outcome, TrialKey
from deft_client.libero.simulator.environment import Environment, EnvironmentSettings

_HEARTBEAT_S = 0.5
# The same request would be refused again, in every episode.
_HOPELESS = (RefusedRequestError, AccessDeniedError, UnknownEndpointError, ConflictError)


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
    seam: Seam = Seam.FREEZE  # in real time
    seed: int = 7
    video: VideoChoice = VideoChoice.NONE


@dataclass(frozen=True)
class Heartbeat:
    """The worker is alive and its episode goes on."""

    round_trip_ms: float  # of the newest answer


@dataclass(frozen=True)
class EpisodeEnded:
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


Report = Heartbeat | EpisodeEnded | ServerTrouble | Hopeless | Warned

Send = Callable[[Report], None]


class Player:
    """Keeps the environment of one task open from episode to episode."""

    def __init__(self, settings: WorkerSettings, send: Send) -> None:
        self._settings = settings
        self._send = send
        self._environment: Environment | None = None
        self._policy: EpisodePolicy | None = None

    def play(self, key: TrialKey) -> Report:
        """Play one episode and say how it ended."""
        started_s = time.monotonic()
        log = EpisodeLog()
        error = ""
        try:
            environment, policy = self._open(key)
            self._run(environment, policy, key, log)
        except (SimulationError, *_HOPELESS) as trouble:
            return Hopeless(str(trouble))
        except PeerAnswerError as trouble:
            error = str(trouble)
        except EvaluationError as trouble:
            return Hopeless(str(trouble))
        except DeftError as trouble:
            error = str(trouble)
        record = self._record(key, log, error, time.monotonic() - started_s)
        return ServerTrouble(record) if error else EpisodeEnded(record)

    def _open(self, key: TrialKey) -> tuple[Environment, EpisodePolicy]:
        settings = self._settings
        task = selection.find_suite(settings.simulator, key.suite).task(key.task)
        if self._environment is None or self._policy is None or self._environment.task != task:
            self.close()
            opened = selection.open_environment(settings.simulator, task, settings.environment)
            self._environment = opened
            self._policy = build_policy(settings.source, opened)
        return self._environment, self._policy

    def close(self) -> None:
        """Close the environment and the connection; the next episode opens its own."""
        if self._policy is not None:
            self._policy.close()
        if self._environment is not None:
            self._environment.close()
        self._policy = self._environment = None

    def _run(
        self, environment: Environment, policy: EpisodePolicy, key: TrialKey, log: EpisodeLog
    ) -> None:
        plan = self._plan(key)
        pulse = _Pulse(self._send)
        if self._settings.pacing is Pacing.LOCK_STEP:
            play_in_lock_step(environment, policy, plan, log, pulse.beat)
            return
        player = RealTimePlayer(environment, policy)
        try:
            player.play(plan, log, pulse.beat)
        finally:
            player.close()

    def _plan(self, key: TrialKey) -> EpisodePlan:
        settings = self._settings
        episode = f"{settings.folder.name}-{key.suite}-{key.task}-{key.trial}"
        return EpisodePlan(
            trial=key.trial,
            step_limit=settings.step_limit,
            session_id=f"{episode}-{uuid.uuid4().hex[:12]}",  # no two tries share one
            executed_steps=settings.executed_steps,
            seam=settings.seam,
            seed=settings.seed,
            keeps_images=settings.video is not VideoChoice.NONE,
        )

    def _record(self, key: TrialKey, log: EpisodeLog, error: str, wall_s: float) -> EpisodeRecord:
        outcome = Outcome.SUCCEEDED if log.has_succeeded else Outcome.FAILED
        outcome = Outcome.ERRORED if error else outcome
        environment = self._environment
        assets = getattr(environment, "assets", None)
        return EpisodeRecord(
            key=key,
            instruction="" if environment is None else environment.task.instruction,
            outcome=outcome,
            actions=np.stack(log.actions) if log.actions else np.zeros((0, 7)),
            answers=tuple(log.answers),
            held_steps=log.held_steps,
            late_steps=log.late_steps,
            seams=log.seams,
            wall_s=wall_s,
            finished_s=time.time(),
            assets="" if assets is None else str(assets.label),
            video="" if error else self._video(key, log, outcome),
            error=error,
        )

    def _video(self, key: TrialKey, log: EpisodeLog, outcome: Outcome) -> str:
        choice = self._settings.video
        if choice is VideoChoice.NONE or (
            choice is VideoChoice.FAILURES and outcome is Outcome.SUCCEEDED
        ):
            return ""
        name = f"videos/task{key.task:02d}-trial{key.trial:02d}-{outcome.value}.mp4"
        assert self._environment is not None
        try:
            caption = Caption(
                self._environment.task.instruction, outcome, self._settings.step_limit
            )
            write_video(self._settings.folder / name, log, caption)
        except VideoError as error:
            self._send(Warned(str(error)))
            return ""
        return name


class _Pulse:
    """Tells the evaluation, not too often, how far an episode is."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._next_s = time.monotonic()

    def beat(self, log: EpisodeLog) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            newest = log.answers[-1].timings.round_trip_ms if log.answers else 0.0
            self._send(Heartbeat(newest))
            self._next_s = now_s + _HEARTBEAT_S
