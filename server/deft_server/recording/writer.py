"""Writes answered frames to disk beside the serving: one thread, a bounded queue, no robot waits.

A disk that fails stops the recording with a metric and a reason, and serving goes on. Without room
it waits until there is some. Under `/v1/admin/recording` administrators see how it goes, and switch
it on and off.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from queue import Full, Queue
from threading import Lock, Thread

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge

from deft_core.errors import MalformedMessageError, UnusableValueError
from deft_core.recordings import UNRECORDED, RecordedStep
from deft_core.types import ServerInfo
from deft_server.http.gate import ADMIN_PREFIX
from deft_server.recording.files import EpisodeFiles, NoRoomError, SessionKey, locked
from deft_server.serving.events import Event, EventBus, SessionEnded
from deft_server.serving.service import Service
from deft_server.settings import SettingsError

logger = logging.getLogger(__name__)

_MAX_WAITING = 256  # steps between the event loop and the disk
MAX_WAITING_BYTES = 64 * 1024 * 1024  # of their decoded pictures
# Whose frame it is, the step or None for the session's end, and when, by the clock on the wall.
_Job = tuple[SessionKey, RecordedStep | None, float]


@dataclass(frozen=True)
class RecordingStatus:
    """What an operator wants to know."""

    is_on: bool
    reason: str  # why it is off, or waits for room; empty while it is on
    steps: int
    bytes_written: int
    bytes_kept: int


class SessionRecording:
    """The recording of one server.

    `start` and `stop` may be called any number of times, one at a time, on any thread.
    """

    def __init__(
        self,
        open_files: Callable[[], EpisodeFiles],
        events: EventBus,
        registry: CollectorRegistry,
        info: Callable[[], ServerInfo],
    ) -> None:
        self._open_files = open_files
        self._events = events
        self._info = info
        self._files: EpisodeFiles | None = None
        self._queue: Queue[_Job | None] = Queue(_MAX_WAITING)
        self._thread: Thread | None = None
        self._stop_listening: Callable[[], None] = lambda: None
        self._reason = "never started"
        self._no_room = ""  # why nothing is written at the moment
        self._lock = Lock()
        self._waiting_bytes = 0  # under the lock
        counter = partial(Counter, registry=registry)
        gauge = Gauge("deft_recording", "1 while frames are recorded", registry=registry)
        gauge.set_function(lambda: self._is_on)
        self._steps = counter("deft_recorded_steps", "Steps written to disk")
        self._bytes = counter("deft_recorded_bytes", "Bytes written to disk")
        self._dropped = counter(
            "deft_recording_dropped_steps", "Steps left out: a slow or full disk"
        )
        self._stops = counter("deft_recording_stops", "Times the recording stopped", ("reason",))
        for reason in ("switched off", "no room", "the disk", "the recorder"):
            self._stops.labels(reason)  # from 0 on: an alert on `increase()` sees the first

    @property
    def status(self) -> RecordingStatus:
        """How it is going."""
        files = self._files
        return RecordingStatus(
            is_on=self._is_on,
            reason=self._no_room if self._is_running else self._reason,
            steps=files.num_steps if files else 0,
            bytes_written=files.num_bytes if files else 0,
            bytes_kept=files.total_bytes if files else 0,
        )

    @property
    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def _is_on(self) -> bool:
        return self._is_running and not self._no_room

    def start(self) -> None:
        """Record from now on. Raises `OSError` where the directory cannot be used.

        Blocks: it looks at every recording that is there.
        """
        if self._is_running:
            return
        files = self._files = self._open_files()
        queue = self._queue = Queue(_MAX_WAITING)
        self._waiting_bytes = 0
        self._reason, self._no_room = "stopped unexpectedly", ""
        self._thread = Thread(
            target=self._write_all, args=(files, queue), name="recording", daemon=True
        )
        self._thread.start()
        self._stop_listening = self._events.listen(self._note)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Write what waits, close every file, and stop. Blocks until then, or leaves a disk behind
        that takes longer."""
        self._stop_listening()
        thread = self._thread
        if thread is None or not thread.is_alive():
            return
        until_s = time.monotonic() + timeout_s
        with contextlib.suppress(Full):
            self._queue.put(None, timeout=timeout_s)
        thread.join(max(0.0, until_s - time.monotonic()))
        if thread.is_alive():
            self._thread = None
            self._reason = f"the disk did not take what waited within {timeout_s:g} s"
            logger.error("recording stopped: %s", self._reason)

    def _note(self, event: Event) -> None:
        """Take an event on the event loop; must not wait."""
        job = _job_of(event)
        if job is None:
            return
        num_bytes = _num_bytes(job)
        with self._lock:
            fits = self._waiting_bytes + num_bytes <= MAX_WAITING_BYTES
            self._waiting_bytes += num_bytes if fits else 0
        try:
            if not fits:
                raise Full
            self._queue.put_nowait(job)
        except Full:
            self._dropped.inc()
            if fits:
                self._release(num_bytes)

    def _write_all(self, files: EpisodeFiles, queue: Queue[_Job | None]) -> None:
        reason = "switched off"
        try:
            while (job := queue.get()) is not None:
                if files.info is None:
                    files.info = self._info()
                try:
                    self._write(files, job)
                    self._no_room = ""
                except NoRoomError as error:
                    self._wait_for_room(str(error))
                self._release(_num_bytes(job))
        except OSError as error:
            reason = f"the disk failed: {error}"
            logger.error("recording stopped: %s", error)
        except Exception as error:
            reason = f"the recorder failed: {error}"
            logger.exception("recording stopped")
        finally:
            self._stop_listening()
            files.close(reason)
            if files is self._files and self._thread is not None:  # and was not left behind
                self._reason = reason
            self._stops.labels(reason.partition(" failed")[0]).inc()

    def _wait_for_room(self, reason: str) -> None:
        """Leave a step out; the next one tries again."""
        self._dropped.inc()
        if not self._no_room:
            logger.error("recording waits for room: %s", reason)
            self._stops.labels("no room").inc()
        self._no_room = reason

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self._waiting_bytes -= num_bytes

    def _write(self, files: EpisodeFiles, job: _Job) -> None:
        key, step, wall_s = job
        if step is None:
            files.end(key, "reset")
            return
        before = files.num_bytes
        files.write(key, step, wall_s)
        self._steps.inc()
        self._bytes.inc(files.num_bytes - before)


def _num_bytes(job: _Job) -> int:
    """Return what a job holds in memory, but for small change."""
    step = job[1]
    if step is None:
        return 0
    seen = step.observation
    return sum(one.nbytes for one in (seen.image, *seen.cameras.values()))


def _job_of(event: Event) -> _Job | None:
    key = event.caller, event.session_id or ""
    if key[1].startswith(UNRECORDED):
        return None
    if isinstance(event, SessionEnded):
        return key, None, time.time()
    if event.chunk is None:
        return None
    at_s = time.monotonic()
    step = RecordedStep(event.step, at_s, event.observation, event.options, event.chunk)
    return key, step, time.time()


def build_recording(service: Service) -> SessionRecording | None:
    """Return what `record` asks for; raise `SettingsError` where the directory cannot be used."""
    settings = service.settings
    if settings.record is None:
        return None
    open_files = partial(
        EpisodeFiles,
        settings.record,
        settings.record_frames,
        max_total_bytes=settings.record_max_bytes,
        min_free_bytes=settings.record_min_free_bytes,
    )
    try:
        locked(settings.record).close()
    except OSError as error:
        raise SettingsError(f"cannot record to {settings.record}: {error}") from error
    registry = service.metrics.registry
    return SessionRecording(open_files, service.events, registry, lambda: service.last_info)


def build_recording_router(recording: SessionRecording | None) -> APIRouter:
    """Return the routes around a recording, or those that say how to have one."""
    router = APIRouter()
    switching = asyncio.Lock()

    def current_status() -> JSONResponse:
        if recording is None:
            return JSONResponse({"is_on": False, "reason": "started without --record"})
        return JSONResponse(asdict(recording.status))

    async def status() -> JSONResponse:
        """Say whether frames are recorded, and why not."""
        return current_status()

    async def switch(request: Request) -> JSONResponse:
        """Switch the recording on or off: `{"on": true}`."""
        wanted = _wanted(await request.body())
        if recording is None:
            raise UnusableValueError("on", "start the server with --record DIR to record")
        async with switching:
            try:
                await asyncio.to_thread(recording.start if wanted else recording.stop)
            except OSError as error:
                raise UnusableValueError("on", f"cannot record: {error}") from error
        return current_status()

    path = f"{ADMIN_PREFIX}/recording"
    router.add_api_route(path, status, methods=["GET"])
    router.add_api_route(path, switch, methods=["POST"])
    return router


def _wanted(body: bytes) -> bool:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError("body", f"is not JSON: {error}") from None
    wanted = value.get("on") if isinstance(value, dict) else None
    if not isinstance(wanted, bool):
        raise UnusableValueError("on", 'send {"on": true} or {"on": false}')
    return wanted
