"""Worker processes: started, given episodes, listened to, and replaced when they die or hang.

They are spawned, never forked: OpenGL and threads do not survive a fork.
"""

import faulthandler
import logging
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from deft_client.libero.evaluation.player import Player, Report, Warned, WorkerSettings
from deft_client.libero.processes import end_with_parent
from deft_client.libero.results.records import TrialKey

_STDOUT, _STDERR = 1, 2


def work(line: Connection, settings: WorkerSettings, log_file: Path) -> None:
    """Play episodes until the evaluation closes the connection. Entry point of the process."""
    _prepare_process(log_file)
    outbox = _Outbox(line)
    logging.getLogger("deft_client").addHandler(_Forwarder(outbox))
    player = Player(settings, outbox.send)
    with suppress(EOFError):
        while True:
            outbox.send(player.play(line.recv()))


def _prepare_process(log_file: Path) -> None:
    """Settle signals, output and what happens when the evaluation is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the evaluation ends its workers in order
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, _STDOUT)
    os.dup2(descriptor, _STDERR)
    os.close(descriptor)
    faulthandler.enable()
    end_with_parent()


class _Outbox:
    """Sends from several threads without mixing messages."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._lock = threading.Lock()

    def send(self, report: Report) -> None:
        with self._lock:
            self._line.send(report)


class _Forwarder(logging.Handler):
    """Brings warnings to the terminal, which belongs to the evaluation."""

    def __init__(self, outbox: _Outbox) -> None:
        super().__init__(logging.WARNING)
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._outbox.send(Warned(record.getMessage()))


_MAX_REASON = 300  # characters
_JOIN_S = 5.0


@dataclass(frozen=True)
class Died:
    """The process is gone."""

    reason: str


@dataclass(eq=False)
class Worker:
    """One process and the episode it was given. Only the pool changes it."""

    process: SpawnProcess
    line: Connection
    log_file: Path
    key: TrialKey | None = None
    task: tuple[str, int] | None = None  # whose environment it has open
    heard_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, eq=False)
class WorkerReport:
    """What came from a worker, and the episode it is about."""

    worker: Worker
    report: Report | Died


class WorkerPool:
    """Keeps `num_workers` processes at work. Use as a context manager."""

    def __init__(
        self, settings: WorkerSettings, num_workers: int, hang_timeout_s: float = 300.0
    ) -> None:
        self._settings = settings
        self._hang_timeout_s = hang_timeout_s
        self._context = multiprocessing.get_context("spawn")
        self._started = 0
        self.workers = [self._start() for _ in range(num_workers)]

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @property
    def idle(self) -> list[Worker]:
        """Workers without an episode."""
        return [worker for worker in self.workers if worker.key is None]

    def assign(self, worker: Worker, key: TrialKey) -> None:
        """Hand an episode to an idle worker. If it is dead, `listen` will say so."""
        worker.key = key
        worker.task = (key.suite, key.task)
        worker.heard_s = time.monotonic()
        try:
            worker.line.send(key)
        except OSError:
            worker.process.join(_JOIN_S)

    def listen(self, timeout_s: float) -> list[WorkerReport]:
        """What the workers report within the timeout; who died is replaced."""
        lines = {worker.line: worker for worker in self.workers}
        sentinels = {worker.process.sentinel: worker for worker in self.workers}
        ready = wait([*lines, *sentinels], timeout_s)
        reports = []
        for worker in dict.fromkeys(
            lines[one] if isinstance(one, Connection) else sentinels[one]  # type: ignore[index]
            for one in ready
        ):
            reports.append(self._receive(worker))
        reports += [self._replace(worker, self._hung()) for worker in self._silent()]
        return reports

    def _receive(self, worker: Worker) -> WorkerReport:
        try:
            report: Report | None = worker.line.recv() if worker.line.poll() else None
        except (EOFError, OSError):
            report = None
        if report is None:
            return self._replace(worker)
        worker.heard_s = time.monotonic()
        return WorkerReport(worker, report)

    def _silent(self) -> list[Worker]:
        limit_s = time.monotonic() - self._hang_timeout_s
        return [one for one in self.workers if one.key is not None and one.heard_s < limit_s]

    def _hung(self) -> str:
        return f"the worker was silent for {self._hang_timeout_s:.0f} s and was ended"

    def _replace(self, worker: Worker, reason: str = "") -> WorkerReport:
        """End a worker that is dead or hangs, and start another one in its place."""
        _end(worker)
        self.workers[self.workers.index(worker)] = self._start()
        return WorkerReport(worker, Died(reason or _reason_of_death(worker)))

    def _start(self) -> Worker:
        folder = self._settings.folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        log_file = folder / f"worker-{self._started}.log"
        self._started += 1
        line, far_line = self._context.Pipe()
        process = self._context.Process(
            target=work, args=(far_line, self._settings, log_file), daemon=True
        )
        process.start()
        far_line.close()  # only the worker may hold its end, or nobody would notice that it is gone
        return Worker(process, line, log_file)

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        for worker in self.workers:
            _end(worker)


def _end(worker: Worker) -> None:
    worker.line.close()
    worker.process.kill()
    worker.process.join(_JOIN_S)


def _reason_of_death(worker: Worker) -> str:
    code = worker.process.exitcode
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with {code}"
    try:
        lines = worker.log_file.read_text("utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    reason = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return f"the worker {how}: {reason[:_MAX_REASON]} (all of it in {worker.log_file})"
