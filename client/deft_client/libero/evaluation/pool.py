"""Workers: started, given episodes, listened to, and replaced when they die or hang.

Where they run is a `Workplace`: processes of this machine, or actors of a Ray cluster.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from deft_client.libero.evaluation.player import Report, Send, Warned
from deft_client.libero.evaluation.runs import RunConfig
from deft_client.libero.results.records import TrialKey

MAX_REASON = 300  # characters


@dataclass(frozen=True)
class Died:
    """The worker is gone."""

    reason: str


class WorkerHandle(Protocol):
    """The evaluation's end of one worker."""

    @property
    def is_placed(self) -> bool:
        """Whether it has a machine to run on, and can be given an episode."""

    def send(self, key: TrialKey) -> None:
        """Have it play an episode. If it is dead, `receive` will say so."""

    def receive(self) -> Report | Died | None:
        """The next report, once `Workplace.wait` named this worker; None: nothing of interest."""

    def end(self) -> None:
        """End it, whatever it is doing."""


class Workplace(Protocol):
    """Where workers run."""

    def start(self, config: RunConfig) -> WorkerHandle:
        """Start a worker."""

    def wait(self, timeout_s: float) -> Sequence[WorkerHandle]:
        """Wait until some of the workers have something to say, and return those."""

    def close(self) -> None:
        """Leave, once all workers are ended."""


@dataclass(eq=False)
class Worker:
    """One worker and the episode it was given. Only the pool changes it."""

    handle: WorkerHandle
    key: TrialKey | None = None
    task: tuple[str, int] | None = None  # whose environment it has open
    heard_s: float = field(default_factory=time.monotonic)


class WorkerPool:
    """Keeps `num_workers` at work. Use as a context manager."""

    def __init__(
        self,
        place: Workplace,
        config: RunConfig,
        num_workers: int,
        hang_timeout_s: float = 300.0,
    ) -> None:
        self._place = place
        self._config = config
        self._hang_timeout_s = hang_timeout_s
        self.workers = [self._start() for _ in range(num_workers)]

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @property
    def idle(self) -> list[Worker]:
        """Workers that could play an episode."""
        return [one for one in self.workers if one.key is None and one.handle.is_placed]

    def assign(self, worker: Worker, key: TrialKey) -> None:
        """Hand an episode to an idle worker. If it is dead, `listen` will say so."""
        worker.key = key
        worker.task = (key.suite, key.task)
        worker.heard_s = time.monotonic()
        worker.handle.send(key)

    def listen(self, timeout_s: float) -> list[tuple[Worker, Report | Died]]:
        """What the workers report within the timeout; who died or hangs is replaced."""
        speaking = self._place.wait(timeout_s)
        reports: list[tuple[Worker, Report | Died]] = []
        for worker in [one for one in self.workers if one.handle in speaking]:
            report = worker.handle.receive()
            worker.heard_s = time.monotonic()
            if isinstance(report, Died):
                self._replace(worker)
            if report is not None:
                reports.append((worker, report))
        for worker in self._silent():
            self._replace(worker)
            reports.append((worker, Died(self._hung())))
        return reports

    def _silent(self) -> list[Worker]:
        limit_s = time.monotonic() - self._hang_timeout_s
        return [one for one in self.workers if one.key is not None and one.heard_s < limit_s]

    def _hung(self) -> str:
        return f"the worker was silent for {self._hang_timeout_s:.0f} s and was ended"

    def _replace(self, worker: Worker) -> None:
        """End a worker that is dead or hangs, and start another one in its place."""
        worker.handle.end()
        self.workers[self.workers.index(worker)] = self._start()

    def _start(self) -> Worker:
        return Worker(self._place.start(self._config))

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        for worker in self.workers:
            worker.handle.end()


class WarningForwarder(logging.Handler):
    """Brings a worker's warnings to the terminal, which belongs to the evaluation."""

    def __init__(self, send: Send) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send what the person at the terminal should know."""
        with suppress(OSError):
            self._send(Warned(record.getMessage()))
