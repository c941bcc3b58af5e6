"""Workers: started, given episodes, listened to, and replaced when they die or hang.

Where they run is a `Workplace`: processes of this machine, or actors of a Ray cluster. Processes
are spawned, never forked: OpenGL and threads do not survive a fork.
"""

import faulthandler
import logging
import multiprocessing
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

from deft_libero.evaluation.player import Player, Send, Warned, WorkerMessage
from deft_libero.evaluation.runs import RunConfig
from deft_libero.processes import end_with_parent
from deft_libero.results.records import TrialKey

_STDOUT, _STDERR = 1, 2
_JOIN_S = 5.0
_HANGS_AFTER_S = 300.0  # of silence
MAX_REASON = 300  # characters


@dataclass(frozen=True)
class Died:
    """The worker is gone."""

    reason: str


@dataclass(eq=False, kw_only=True)
class Worker(ABC):
    """The evaluation's end of one worker, with the episode it was given, which the pool notes."""

    ends: Sequence[Any]  # one of them is ready when it has something to say
    is_placed: bool = False  # on a machine: it can be given an episode
    key: TrialKey | None = None
    task: tuple[str, int] | None = None  # whose environment it has open
    heard_s: float = field(default_factory=time.monotonic)

    @abstractmethod
    def send(self, key: TrialKey) -> None:
        """Have it play an episode. If it is dead, `receive` will say so."""

    @abstractmethod
    def receive(self) -> WorkerMessage | Died | None:
        """The next report, once one of its ends is ready; None: nothing of interest."""

    @abstractmethod
    def end(self) -> None:
        """End it, whatever it is doing."""


class Workplace(Protocol):
    """Where workers run."""

    def start(self, config: RunConfig) -> Worker:
        """Start a worker."""

    def wait(self, ends: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """Wait until some of the workers' ends are ready, and return those."""

    def close(self) -> None:
        """Leave, once all workers are ended."""


class WorkerPool:
    """Keeps `num_workers` at work, until it is closed."""

    def __init__(self, place: Workplace, config: RunConfig, num_workers: int) -> None:
        self._place = place
        self._config = config
        self.workers = [place.start(config) for _ in range(num_workers)]

    @property
    def idle(self) -> list[Worker]:
        """Workers that could play an episode."""
        return [one for one in self.workers if one.key is None and one.is_placed]

    def assign(self, worker: Worker, key: TrialKey) -> None:
        """Hand an episode to an idle worker. If it is dead, `listen` will say so."""
        worker.key = key
        worker.task = (key.suite, key.task)
        worker.heard_s = time.monotonic()
        worker.send(key)

    def listen(self, timeout_s: float) -> list[tuple[Worker, WorkerMessage | Died]]:
        """What the workers report within the timeout; who died or hangs is replaced."""
        ends = [end for worker in self.workers for end in worker.ends]
        ready = set(self._place.wait(ends, timeout_s))
        reports: list[tuple[Worker, WorkerMessage | Died]] = []
        for worker in [one for one in self.workers if ready.intersection(one.ends)]:
            report = worker.receive()
            worker.heard_s = time.monotonic()
            if isinstance(report, Died):
                self._replace(worker)
            if report is not None:
                reports.append((worker, report))
        latest_s = time.monotonic() - _HANGS_AFTER_S
        for worker in [one for one in self.workers if one.key and one.heard_s < latest_s]:
            self._replace(worker)
            silence = f"the worker was silent for {_HANGS_AFTER_S:.0f} s and was ended"
            reports.append((worker, Died(silence)))
        return reports

    def _replace(self, worker: Worker) -> None:
        """End a worker that is dead or hangs, and start another one in its place."""
        worker.end()
        self.workers[self.workers.index(worker)] = self._place.start(self._config)

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        for worker in self.workers:
            worker.end()


class WarningForwarder(logging.Handler):
    """Brings a worker's warnings to the terminal, which belongs to the evaluation."""

    def __init__(self, send: Send) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send what the person at the terminal should know."""
        with suppress(OSError):
            self._send(Warned(record.getMessage()))


def work(pipe: Connection, config: RunConfig, log_file: Path) -> None:
    """Play episodes until the evaluation closes the connection. Entry point of the process."""
    _prepare_process(log_file)
    one_at_a_time = threading.Lock()

    def send(report: WorkerMessage) -> None:
        with one_at_a_time:
            pipe.send(report)

    logging.getLogger("deft_client").addHandler(WarningForwarder(send))
    player = Player(config, send)
    with suppress(EOFError):
        while True:
            send(player.play(pipe.recv()))


def _prepare_process(log_file: Path) -> None:
    """Settle signals, output and what happens when the evaluation is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the evaluation ends its workers in order
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, _STDOUT)
    os.dup2(descriptor, _STDERR)
    os.close(descriptor)
    faulthandler.enable()
    end_with_parent()


@dataclass(eq=False)
class ProcessWorker(Worker):
    """One process."""

    process: SpawnProcess
    connection: Connection
    log_file: Path

    def send(self, key: TrialKey) -> None:
        """Have it play an episode."""
        try:
            self.connection.send(key)
        except OSError:
            self.process.join(_JOIN_S)

    def receive(self) -> WorkerMessage | Died | None:
        """What it says, or how it ended."""
        try:
            if self.connection.poll():
                report: WorkerMessage = self.connection.recv()
                return report
        except (EOFError, OSError):
            pass
        self.end()
        return Died(self._reason_of_death())

    def end(self) -> None:
        """Kill it."""
        self.connection.close()
        self.process.kill()
        self.process.join(_JOIN_S)

    def _reason_of_death(self) -> str:
        code = self.process.exitcode
        killed = code is not None and code < 0
        how = f"was killed by signal {-(code or 0)}" if killed else f"ended with {code}"
        try:
            lines = self.log_file.read_text("utf-8", errors="replace").split("\n")
        except OSError:
            lines = []
        reason = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"the worker {how}: {reason[:MAX_REASON]} (all of it in {self.log_file})"


class Processes:
    """A `Workplace`: this machine."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._num_started = 0

    def start(self, config: RunConfig) -> ProcessWorker:
        """Start a process."""
        folder = config.folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        log_file = folder / f"worker-{self._num_started}.log"
        self._num_started += 1
        pipe, far_pipe = self._context.Pipe()
        process = self._context.Process(target=work, args=(far_pipe, config, log_file), daemon=True)
        process.start()
        far_pipe.close()  # only the worker may hold its end, or nobody would notice that it is gone
        ends = (pipe, process.sentinel)
        return ProcessWorker(process, pipe, log_file, ends=ends, is_placed=True)

    def wait(self, ends: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """Wait for something to read, or for a process to end."""
        return wait(ends, timeout_s)

    def close(self) -> None:
        """Nothing is left."""
