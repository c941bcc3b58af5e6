"""Plays episodes inside a worker process: the messages it gets and sends."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from deft_client.errors import (
    AccessDeniedError,
    ConflictError,
    RefusedRequestError,
    UnknownEndpointError,
)
from deft_core.errors import DeftError, UsageError
from deft_core.types import Image
from deft_libero.errors import EvaluationError, SimulationError, UnstableError, VideoError
from deft_libero.evaluation import selection
from deft_libero.evaluation.episode import EpisodeLog, EpisodePlayer
from deft_libero.evaluation.runs import RunConfig, VideoChoice
from deft_libero.evaluation.video import write_video
from deft_libero.policies.source import EpisodePolicy, build_policy
from deft_libero.results.records import EpisodeRecord, Outcome, TrialKey
from deft_libero.simulator.environment import Environment

_HEARTBEAT_S = 0.5
# The same request would be refused again, in every episode.
_REFUSED = (RefusedRequestError, AccessDeniedError, UnknownEndpointError, ConflictError)


@dataclass(frozen=True)
class Heartbeat:
    """The worker is alive and its episode goes on."""

    round_trip_ms: float  # of the newest answer


@dataclass(frozen=True)
class Opening:
    """The worker opens a scene, which may take a minute."""

    scene: str


@dataclass(frozen=True)
class EpisodeEnded:
    """The episode Succeeded, Failed or Errored; some of what ends one may pass."""

    record: EpisodeRecord
    is_retryable: bool = False  # the server did not answer: try again
    video: bytes = b""  # where it was played elsewhere, and is still to be kept here


@dataclass(frozen=True)
class CannotPlay:
    """No episode can be played: the simulator does not open, or the server refuses our kind."""

    reason: str


@dataclass(frozen=True)
class Warned:
    """Something the person at the terminal should know."""

    text: str


WorkerMessage = Heartbeat | Opening | EpisodeEnded | CannotPlay | Warned

Send = Callable[[WorkerMessage], None]


class Player:
    """Keeps the environment of one task open from episode to episode."""

    def __init__(self, config: RunConfig, send: Send) -> None:
        self._config = config
        self._send = send
        self._environment: Environment | None = None
        self._policy: EpisodePolicy | None = None
        self._next_heartbeat_s = 0.0

    def play(self, key: TrialKey) -> WorkerMessage:
        """Play one episode and say how it ended."""
        started_s = time.monotonic()
        # No two tries share a session. A method written out may be longer than its name may be.
        session_id = f"{self._config.folder.name[:64]}-{key.task}-{key.trial}-"
        session_id += uuid.uuid4().hex[:12]
        log, error, is_retryable = EpisodeLog(), "", False
        try:
            environment, policy = self._open(key)
            episode = EpisodePlayer(environment, policy, self._config, self._beat)
            log = episode.log
            episode.play(key.trial, session_id)
        except UnstableError as trouble:  # of this episode's physics: others may be well
            error = str(trouble)
        except (SimulationError, EvaluationError, UsageError, *_REFUSED) as trouble:
            return CannotPlay(str(trouble))
        except DeftError as trouble:
            error, is_retryable = str(trouble), True
        wall_s = time.monotonic() - started_s
        return EpisodeEnded(self._record(key, log, error, wall_s), is_retryable)

    def _open(self, key: TrialKey) -> tuple[Environment, EpisodePolicy]:
        config = self._config
        task = selection.find_suite(config.simulator, key.suite).task(key.task)
        if self._environment is None or self._policy is None or self._environment.task != task:
            self.close()
            self._send(Opening(f"{key.suite} task {key.task}"))
            opened = selection.open_environment(config.simulator, task, config.environment)
            self._environment = opened
            self._policy = build_policy(config.source, opened)
        return self._environment, self._policy

    def close(self) -> None:
        """Close the environment and the connection; the next episode opens its own."""
        if self._policy is not None:
            self._policy.close()
        if self._environment is not None:
            self._environment.close()
        self._policy = self._environment = None

    def _beat(self, log: EpisodeLog) -> None:
        """Tell the evaluation, not too often, how far the episode is."""
        now_s = time.monotonic()
        if now_s >= self._next_heartbeat_s:
            newest = log.answers[-1].timings.round_trip_ms if log.answers else 0.0
            self._send(Heartbeat(newest))
            self._next_heartbeat_s = now_s + _HEARTBEAT_S

    def _record(self, key: TrialKey, log: EpisodeLog, error: str, wall_s: float) -> EpisodeRecord:
        environment = self._environment
        outcome = Outcome.SUCCEEDED if log.has_succeeded else Outcome.FAILED
        assets = getattr(environment, "assets", None)
        record = EpisodeRecord(
            key=key,
            instruction="" if environment is None else environment.task.instruction,
            outcome=Outcome.ERRORED if error else outcome,
            actions=np.stack(log.actions) if log.actions else np.zeros((0, 7)),
            answers=tuple(log.answers),
            held_steps=log.held_steps,
            late_steps=log.late_steps,
            seams=log.seams,
            wall_s=wall_s,
            finished_s=time.time(),
            assets="" if assets is None else str(assets.label),
            error=error,
        )
        choice = self._config.video
        is_wanted = choice is VideoChoice.ALL or (
            choice is VideoChoice.FAILURES and outcome is Outcome.FAILED
        )
        return self._filmed(record, log.images) if is_wanted and not error else record

    def _filmed(self, record: EpisodeRecord, images: Sequence[Image]) -> EpisodeRecord:
        """The record with its video, which is written now; without one where that fails."""
        key = record.key
        name = f"videos/task{key.task:02d}-trial{key.trial:02d}-{record.outcome.value}.mp4"
        try:
            write_video(self._config.folder / name, record, images, self._config.step_limit)
        except VideoError as error:
            self._send(Warned(str(error)))
            return record
        return replace(record, video=name)
