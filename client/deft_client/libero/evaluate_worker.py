"""A worker process: plays the episodes it is handed, one after the other, until the line closes.

Expected trouble is reported; anything else ends the process, and the evaluation replaces it. What
a worker prints, its last words included, goes to a log file in the folder of the run.
"""

import faulthandler
import logging
import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from deft_client.libero.evaluate_messages import Job, Report, Warned, WorkerSettings
from deft_client.libero.evaluate_player import Player

_STDOUT, _STDERR = 1, 2


def work(line: Connection, lifeline: Connection, settings: WorkerSettings, log_file: Path) -> None:
    """Play episodes until the evaluation hangs up. Entry point of the process."""
    _prepare_process(lifeline, log_file)
    outbox = _Outbox(line)
    logging.getLogger("deft_client").addHandler(_Forwarder(outbox))
    player = Player(settings, outbox.send)
    with suppress(EOFError):
        while True:
            job: Job = line.recv()
            outbox.send(player.play(job))


def _prepare_process(lifeline: Connection, log_file: Path) -> None:
    """Settle signals, output and what happens when the evaluation is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the evaluation ends its workers in order
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, _STDOUT)
    os.dup2(descriptor, _STDERR)
    os.close(descriptor)
    faulthandler.enable()
    threading.Thread(target=_die_with, args=(lifeline,), daemon=True).start()


def _die_with(lifeline: Connection) -> None:
    """End this process as soon as the other end of the lifeline is gone, whatever it is doing."""
    with suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(1)


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
