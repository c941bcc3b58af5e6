"""Runs `deft serve` on a free port of this machine for as long as a block lasts, and asks it."""

import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from deft_client import ClientSettings, PolicyClient
from deft_client.errors import NotReadyError, TransportError
from deft_policies.errors import PolicyError

LISTENING = re.compile(r"listening on (https?://[^\s\"]+)")
READY_WITHIN_S = 900.0  # beside much other work a start takes minutes
STOPPED_WITHIN_S = 30.0
LAST_WORDS = 20  # lines


class ServerDidNotStartError(PolicyError):
    """The server ended, or took too long; the message holds its last words."""


@contextmanager
def local_server(
    *flags: str,
    settings: ClientSettings | None = None,
    log: deque[str] | None = None,
) -> Iterator[str]:
    """Yield the URL of a server that is ready; stop it afterwards. `settings` reach it.

    If it ends earlier, its last words are told: whoever asked it saw no more than refusals. All it
    logs goes into `log`.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "deft_server", "serve", "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    log = deque(maxlen=LAST_WORDS) if log is None else log
    found: deque[str] = deque()
    reader = threading.Thread(target=_follow, args=(process, log, found), daemon=True)
    reader.start()
    url = ""
    try:
        url = _when_ready(process, log, found, settings)
        yield url
    finally:
        code = process.poll()
        process.terminate()
        try:
            process.wait(STOPPED_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        if url and code is not None:
            sys.stderr.write(f"the server ended with {code}; its last words:\n{_last_words(log)}")


def _follow(process: subprocess.Popen[str], log: deque[str], found: deque[str]) -> None:
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            log.append(line)
            if match := LISTENING.search(line):
                found.append(match[1])


def _when_ready(
    process: subprocess.Popen[str],
    log: deque[str],
    found: deque[str],
    settings: ClientSettings | None,
) -> str:
    gives_up_at = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < gives_up_at and process.poll() is None:
        if found and _is_ready(found[0], settings):
            return found[0]
        time.sleep(0.05)
    raise ServerDidNotStartError(f"the server did not start; its last words:\n{_last_words(log)}")


def _last_words(log: deque[str]) -> str:
    return "".join(list(log)[-LAST_WORDS:])


def _is_ready(url: str, settings: ClientSettings | None) -> bool:
    try:
        with PolicyClient(url, settings) as policy:
            policy.ping()
    except (TransportError, NotReadyError):
        return False
    return True


def port_of(url: str) -> int:
    """The port of a local server's URL."""
    return int(url.rsplit(":", 1)[1])


def read_metric(text: str, name: str) -> float:
    """A number of /metrics, such as `process_resident_memory_bytes`; NaN where it is not there."""
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else float("nan")


def ask_metric(url: str, name: str) -> float:
    """The same of a server."""
    return read_metric(httpx.get(f"{url}/metrics").text, name)


def resident_mb(url: str) -> float:
    """How much memory a server holds."""
    return ask_metric(url, "process_resident_memory_bytes") / 2**20
