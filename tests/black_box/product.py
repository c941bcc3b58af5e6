"""Runs the product as its users do: servers and commands, seen from outside."""

import contextlib
import importlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = GOLDEN / "black_box" / "files"  # written at cf614d6, never made anew
SERVER = "deft_server.__main__"
CLIENT = "deft_client.__main__"
TINY_OPENVLA = GOLDEN / "tiny_openvla"
START_S = 200.0
SECONDS_TO_STOP = 30.0
TINY_FLAGS = (
    *("--policy", "openvla", "--checkpoint", str(TINY_OPENVLA), "--statistics-key", "bridge_orig"),
    *("--dtype", "float32", "--device", "cpu", "--threads", "1", "--no-guard"),
)


def environment() -> dict[str, str]:
    """Of a process that finds the packages where this one does, and has no settings of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DEFT_")}
    path = os.pathsep.join(one for one in sys.path if one)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


@dataclass
class Server:
    """A `deft serve` on this machine."""

    port: int
    process: subprocess.Popen[str]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS_TO_STOP)


@contextmanager
def serving(*flags: str) -> Iterator[Server]:
    """Run `deft serve` on a free port until it is no longer needed."""
    command = [sys.executable, "-m", "deft_server", "serve", "--port", "0", "--log-format", "json"]
    process = subprocess.Popen(
        [*command, *flags], stderr=subprocess.PIPE, text=True, env=environment()
    )
    log: list[str] = []
    listening = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            log.append(line)
            if "listening on http://127.0.0.1:" in line:
                listening.set()
        listening.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert listening.wait(START_S), "".join(log)
        lines = [line for line in log if "listening on" in line]
        assert lines, "".join(log)
        server = Server(int(lines[0].split("127.0.0.1:")[1].split('"')[0].strip("/")), process)
        wait_until_ready(server, log)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(SECONDS_TO_STOP)
        reader.join(SECONDS_TO_STOP)
        assert process.stderr is not None
        process.stderr.close()


def wait_until_ready(server: Server, log: list[str]) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        with contextlib.closing(
            HTTPConnection("127.0.0.1", server.port, timeout=START_S)
        ) as connection:
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        assert server.process.poll() is None, "".join(log)
        time.sleep(0.02)
    raise AssertionError("".join(log))


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


def run(module: str, *arguments: str) -> Ended:
    """Call a command's `main(arguments)` in this process, on a terminal of 100 columns."""
    out, err = io.StringIO(), io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = importlib.import_module(module).main(list(arguments))
            except SystemExit as ended:
                code = ended.code
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return Ended(int(code or 0), out.getvalue(), err.getvalue())


def run_apart(module: str, *arguments: str) -> Ended:
    """The same in a process of its own, for commands that set things for the whole process."""
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=120,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)
