"""Log lines as JSON or text, each with the id of the request it is about.

Written by a thread of their own: a full pipe behind stderr must not stop the event loop.
"""

import asyncio
import json
import logging
import sys
import time
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from threading import Thread
from typing import Any, TextIO

from deft_server.serving.access import current_request_id
from deft_server.settings import Settings

MAX_LINES = 10_000  # that wait to be written
_TEXT = "%(asctime)s %(levelname)-7s %(name)s [%(request_id)s] %(message)s"


class _Tagged(QueueHandler):
    """Marks a record with the request it belongs to, on the thread that logs it.

    Lines that nobody takes are dropped beyond a number, which is kinder than to fill the memory.
    """

    queue: SimpleQueue[logging.LogRecord]

    def enqueue(self, record: logging.LogRecord) -> None:
        if self.queue.qsize() < MAX_LINES:
            super().enqueue(record)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        if not hasattr(record, "request_id"):
            record.request_id = current_request_id.get()
        return record


class TextFormatter(logging.Formatter):
    """One line per record, and more only for a traceback: nobody's text begins a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return a record as a line."""
        return _in_print(super().formatMessage(record))

    def formatException(self, error: Any) -> str:
        """Return a traceback whose lines are indented; what was raised may quote anybody."""
        lines = super().formatException(error).split("\n")
        return "\n".join(f"  {_in_print(line)}" for line in lines)


def _in_print(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        members = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", "") or None,
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({name: value for name, value in members.items() if value is not None})


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Drop uvicorn's tracebacks of requests that it cancelled itself while stopping."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


def start_logging(settings: Settings, stream: TextIO | None = None) -> QueueListener:
    """Send all log lines of the process to `stream` (stderr); stop the listener to flush them."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    auto = "text" if stream.isatty() else "json"
    is_text = (auto if settings.log_format == "auto" else settings.log_format) == "text"
    handler.setFormatter(TextFormatter(_TEXT) if is_text else JsonFormatter())
    queue: SimpleQueue[logging.LogRecord] = SimpleQueue()
    root = logging.getLogger()
    root.handlers = [_Tagged(queue)]
    level = settings.log_level.upper()
    root.setLevel(level)
    # What uvicorn says at level info, we say ourselves.
    logging.getLogger("uvicorn").setLevel("DEBUG" if level == "DEBUG" else "WARNING")
    logging.getLogger("uvicorn.error").addFilter(_is_worth_a_line)
    # It warns of every byte of every broken form; the caller gets an error, and that is enough.
    logging.getLogger("python_multipart").setLevel("ERROR")
    listener = QueueListener(queue, handler)
    listener.start()
    return listener


def end_logging(listener: QueueListener, timeout_s: float) -> bool:
    """Write what still waits; return False if whoever reads the lines does not take them."""
    last = Thread(target=listener.stop, daemon=True)
    last.start()
    last.join(timeout_s)
    return not last.is_alive()
