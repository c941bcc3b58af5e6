"""What ends up in the log, and what does not."""

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from deft_server.commands.logs import start_logging
from deft_server.settings import Settings


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Where the lines of a started log go; the loggers are as before afterwards.

    A server that another test ran in this process may have given uvicorn's loggers handlers.
    """
    for name in ("uvicorn", "uvicorn.error"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    root, server = logging.getLogger(), logging.getLogger("uvicorn.error")
    before = root.handlers[:], root.level, server.filters[:], logging.getLogger("uvicorn").level
    stream = io.StringIO()
    listener = start_logging(Settings(), stream)
    stream.stop = listener.stop  # type: ignore[attr-defined]
    yield stream
    root.handlers, root.level, server.filters = before[0], before[1], before[2]
    logging.getLogger("uvicorn").setLevel(before[3])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_text_on_a_terminal_and_json_anywhere_else(lines):
    logging.getLogger("deft").warning("to a file")
    lines.stop()
    assert json.loads(lines.getvalue())["message"] == "to a file"
    terminal = Terminal()
    listener = start_logging(Settings(), terminal)
    logging.getLogger("deft").warning("to a person")
    listener.stop()
    assert terminal.getvalue().endswith("to a person\n")


def log_from_uvicorn(error: BaseException) -> None:
    try:
        raise error
    except BaseException:
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application")


def test_a_request_that_is_cancelled_while_stopping_leaves_no_traceback(lines):
    log_from_uvicorn(asyncio.CancelledError())
    lines.stop()
    assert lines.getvalue() == ""


def test_any_other_exception_does(lines):
    log_from_uvicorn(ValueError("unforeseen"))
    lines.stop()
    (line,) = map(json.loads, lines.getvalue().splitlines())
    assert "unforeseen" in line["exception"]


FORGED = "lift\n2026-01-01 00:00:00,000 INFO    deft [x] forged\r\x1b[2J\u2028forged\x85forged"


@pytest.mark.parametrize("kind", ["text", "json"])
def test_nothing_that_a_stranger_says_becomes_a_line_of_its_own(lines, kind: str):
    lines.stop()
    terminal = Terminal()
    listener = start_logging(Settings(log_format=kind), terminal)
    logging.getLogger("deft").warning("refused %s", FORGED)
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("deft").exception("unforeseen")
    listener.stop()
    written = terminal.getvalue()
    starts = [one for one in written.splitlines() if re.match(r"\d{4}-|\{", one)]
    assert len(starts) == 2
    assert re.sub(r"[ -~\n]", "", written) == ""  # nothing that moves a cursor
