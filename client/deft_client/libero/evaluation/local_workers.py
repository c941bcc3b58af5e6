"""Workers as processes of this machine.

They are spawned, never forked: OpenGL and threads do not survive a fork.
"""

import faulthandler
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from deft_client.libero.evaluation.player import Player, Report
from deft_client.libero.evaluation.pool import MAX_REASON, Died, WarningForwarder
from deft_client.libero.evaluation.runs import RunConfig
from deft_client.libero.processes import end_with_parent
from deft_client.libero.results.records import TrialKey

_STDOUT, _STDERR = 1, 2
_JOIN_S = 5.0


def work(pipe: Connection, config: RunConfig, log_file: Path) -> None:
    """Play episodes until the evaluation closes the connection. Entry point of the process."""
    _prepare_process(log_file)
    outbox = _Outbox(pipe)
    logging.getLogger("deft_client").addHandler(WarningForwarder(outbox.send))
    player = Player(config, outbox.send)
    with suppress(EOFError):
        while True:
            outbox.send(player.play(pipe.recv()))


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

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, report: Report) -> None:
        with self._lock:
            self._pipe.send(report)


@dataclass(frozen=True, eq=False)
class ProcessHandle:
    """A `WorkerHandle` to one process."""

    process: SpawnProcess
    connection: Connection
    log_file: Path
    is_placed: bool = True

    def send(self, key: TrialKey) -> None:
        """Have it play an episode."""
        try:
            self.connection.send(key)
        except OSError:
            self.process.join(_JOIN_S)

    def receive(self) -> Report | Died | None:
        """What it says, or how it ended."""
        try:
            if self.connection.poll():
                report: Report = self.connection.recv()
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
        self._handles: list[ProcessHandle] = []

    def start(self, config: RunConfig) -> ProcessHandle:
        """Start a process."""
        folder = config.folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        log_file = folder / f"worker-{self._num_started}.log"
        self._num_started += 1
        pipe, far_pipe = self._context.Pipe()
        process = self._context.Process(target=work, args=(far_pipe, config, log_file), daemon=True)
        process.start()
        far_pipe.close()  # only the worker may hold its end, or nobody would notice that it is gone
        self._handles.append(ProcessHandle(process, pipe, log_file))
        return self._handles[-1]

    def wait(self, timeout_s: float) -> Sequence[ProcessHandle]:
        """Wait for something to read, or for a process to end."""
        self._handles = [one for one in self._handles if not one.connection.closed]
        ends = [end for one in self._handles for end in (one.connection, one.process.sentinel)]
        ready = set(wait(ends, timeout_s))
        return [one for one in self._handles if {one.connection, one.process.sentinel} & ready]

    def close(self) -> None:
        """Nothing is left."""
