"""Writes down what a policy saw and answered, one file per episode, and never gets in its way.

A thread of its own encodes and writes: `act` takes no longer than without. The files are those of
`recordings`: readable up to the last whole step after a crash, and what `deft replay` and the
trainers read.
"""

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from deft_core.files import append_whole
from deft_core.recordings import (
    SUFFIX,
    EpisodeHeader,
    RecordedStep,
    encode_end,
    encode_header,
    encode_step,
)
from deft_core.types import ActingPolicy, ActionChunk, ActOptions, Observation
from deft_core.wire.images import ImageEncoding

logger = logging.getLogger(__name__)

MAX_WAITING = 64  # steps that wait for the disk
MAX_WAITING_BYTES = 2**26  # of their pictures
CLOSE_S = 10.0  # for what waits, when the recording ends


class Recorder:
    """A policy that records another one. One robot, one thread.

    A disk that fails, or is too slow, stops the recording, not the robot: `problem` then says why,
    the log too. `flush` or `close` it before the program ends, or the last steps are lost. Nothing
    is recorded once it is closed.
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
        self.problem: Exception | None = None
        self.path: Path | None = None  # of the episode being recorded, or the last one that was
        # Only the thread touches these.
        self._file: BinaryIO | None = None
        self._num_steps = 0
        self._started_s = 0.0
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting = threading.Lock()
        self._waiting_bytes: list[int] = []  # of each step that waits
        self._is_closed = False
        self._thread = threading.Thread(target=self._write, name="deft-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def session_id(self) -> str:
        """The session of the recorded policy."""
        return self._policy.session_id

    def act(self, observation: Observation, options: ActOptions | None = None) -> ActionChunk:
        """Return the policy's answer; it is written down meanwhile."""
        chunk = self._policy.act(observation, options)
        if self._has_room(observation):
            options = options or ActOptions()
            session_id = options.session_id or self.session_id
            step = (
                _copy(observation),
                options,
                replace(chunk, actions=chunk.actions.copy()),
            )
            self._later(partial(self._append, time.monotonic(), session_id, *step))
        return chunk

    def reset(self, session_id: str | None = None) -> None:
        """End the episode's file, and tell the policy that the next one starts."""
        self._later(partial(self._end, "reset"))
        self._policy.reset(session_id)

    def flush(self, patience_s: float = CLOSE_S) -> None:
        """Wait until all steps so far are on the disk, or patience ends."""
        is_written = threading.Event()
        self._later(is_written.set)
        is_written.wait(0.0 if self.problem is not None or self._is_closed else patience_s)

    def close(self) -> None:
        """End the episode's file, and the thread that writes."""
        self._close("closed")

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        self._close("closed" if kind is None else f"stopped by {kind.__name__}")

    def _close(self, reason: str) -> None:
        atexit.unregister(self.close)
        if not self._is_closed:
            self._later(partial(self._end, reason))
            self._is_closed = True
            self._work.put(None)
        # Nobody waits for a recording that was given up.
        self._thread.join(0.0 if self.problem is not None else CLOSE_S)

    def _has_room(self, observation: Observation) -> bool:
        """May this step wait for the disk, too? A single one always may."""
        if self.problem is not None or self._is_closed:
            return False
        pictures = (observation.image, *observation.cameras.values())
        num_bytes = sum(image.nbytes for image in pictures)
        with self._waiting:
            num_waiting, waiting = len(self._waiting_bytes), sum(self._waiting_bytes) + num_bytes
            if not num_waiting or (num_waiting < MAX_WAITING and waiting <= MAX_WAITING_BYTES):
                self._waiting_bytes.append(num_bytes)
                return True
        self._give_up(
            OSError(
                f"the disk is too slow: {num_waiting} steps wait for it, and with another one "
                f"{waiting / 2**20:.0f} MiB of pictures would"
            )
        )
        return False

    def _later(self, work: Callable[[], None]) -> None:
        """Have the thread do something."""
        if not self._is_closed:
            self._work.put(work)

    def _write(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  whatever it is, the robot goes on
                self._give_up(error)
                self._drop_file()

    def _append(
        self,
        at_s: float,
        session_id: str,
        observation: Observation,
        options: ActOptions,
        chunk: ActionChunk,
    ) -> None:
        try:
            if self.problem is not None:
                self._drop_file()
                return
            file = self._file or self._start(session_id, at_s)
            after_s = at_s - self._started_s
            step = RecordedStep(self._num_steps, after_s, observation, options, chunk)
            append_whole(file, encode_step(step, self._encoding))
            self._num_steps += 1
        finally:
            with self._waiting:
                del self._waiting_bytes[0]

    def _start(self, session_id: str, at_s: float) -> BinaryIO:
        self._directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
        name = f"{stamp}_{time.monotonic_ns():020d}{SUFFIX}"
        self.path = self._directory / name
        self._file = self.path.open("xb", buffering=0)  # a step is whole or absent
        self._num_steps = 0
        self._started_s = at_s
        try:
            append_whole(self._file, encode_header(EpisodeHeader(session_id, now)))
        except OSError:
            self.path.unlink(missing_ok=True)  # half a header is nothing that could be read
            raise
        return self._file

    def _end(self, reason: str) -> None:
        file, self._file = self._file, None
        if file is not None and self.problem is None:
            with file:
                append_whole(file, encode_end(reason))

    def _give_up(self, error: Exception) -> None:
        if self.problem is None:
            self.problem = error
            mistake = None if isinstance(error, OSError) else error
            place = self.path or self._directory
            logger.error("recording to %s stopped: %s", place, error, exc_info=mistake)

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # a disk that is gone may say so once more
                file.close()


def _copy(observation: Observation) -> Observation:
    """Its own pixels: the camera may use the memory again before they are written."""
    cameras = {name: image.copy() for name, image in observation.cameras.items()}
    state = observation.state
    return replace(
        observation,
        image=observation.image.copy(),
        cameras=cameras,
        state=None if state is None else state.copy(),
    )
