"""Writes down what a policy saw and answered, one file per episode, and never gets in its way.

The files are those of `recordings`: readable up to the last whole step after a crash, and what
`deft replay` and the trainers read.
"""

import logging
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from deft_client.calls import ActingPolicy
from deft_client.files import append_whole
from deft_client.recordings import (
    SUFFIX,
    EpisodeHeader,
    RecordedStep,
    encode_end,
    encode_header,
    encode_step,
)
from deft_client.types import ActionChunk, ActOptions, Observation
from deft_client.wire.images import ImageEncoding

logger = logging.getLogger(__name__)


class Recorder:
    """A policy that records another one. One robot, one thread.

    A disk that fails stops the recording, not the robot: `problem` then says why, the log too.
    """

    def __init__(
        self,
        policy: ActingPolicy,
        directory: Path,
        encoding: ImageEncoding = ImageEncoding.PNG,
    ) -> None:
        self._policy = policy
        self._directory = directory
        self._encoding = encoding
        self._file: BinaryIO | None = None
        self._num_steps = 0
        self._started_s = 0.0
        self.problem: OSError | None = None
        self.path: Path | None = None  # of the episode being recorded, or the last one that was

    @property
    def session_id(self) -> str:
        """The session of the recorded policy."""
        return self._policy.session_id

    @property
    def is_recording(self) -> bool:
        """Does every step still reach the disk?"""
        return self.problem is None

    def act(self, observation: Observation, options: ActOptions | None = None) -> ActionChunk:
        """Return the policy's answer, having written it down."""
        chunk = self._policy.act(observation, options)
        if self.problem is None:
            try:
                self._append(observation, options or ActOptions(), chunk)
            except OSError as error:
                self._give_up(error)
        return chunk

    def reset(self, session_id: str | None = None) -> None:
        """End the episode's file, and tell the policy that the next one starts."""
        self._end("reset")
        self._policy.reset(session_id)

    def close(self) -> None:
        """End the episode's file."""
        self._end("closed")

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end("closed" if error is None else f"stopped by {type(error).__name__}")

    def _append(self, observation: Observation, options: ActOptions, chunk: ActionChunk) -> None:
        file = self._file or self._start(options.session_id or self.session_id)
        at_s = time.monotonic() - self._started_s
        step = RecordedStep(self._num_steps, at_s, observation, options, chunk)
        append_whole(file, encode_step(step, self._encoding))
        self._num_steps += 1

    def _start(self, session_id: str) -> BinaryIO:
        self._directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
        name = f"{stamp}_{time.monotonic_ns():020d}{SUFFIX}"
        self.path = self._directory / name
        self._file = self.path.open("xb", buffering=0)  # a step is whole or absent
        self._num_steps = 0
        self._started_s = time.monotonic()
        try:
            append_whole(self._file, encode_header(EpisodeHeader(session_id, now)))
        except OSError:
            self.path.unlink(missing_ok=True)  # half a header is nothing that could be read
            raise
        return self._file

    def _end(self, reason: str) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            with file:
                append_whole(file, encode_end(reason))
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.problem = error
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # a disk that is gone may say so once more
                file.close()
        logger.error("recording to %s stopped: %s", self.path or self._directory, error)
