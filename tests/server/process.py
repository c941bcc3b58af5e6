"""A server in a process of its own, for tests of signals, sockets and exit codes."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
START_S = 200.0
_PREFACE = """
import sys
sys.path[:0] = [{root!r}, *({root!r} + "/" + name for name in ("client", "policies", "server"))]
from deft_server.commands import serve
from deft_server.app import create_app
from deft_server.settings import *
from tests.standins.policies import *
raise SystemExit(serve.run(create_app({policy}, Settings(port=0, {settings}))))
"""


class ServerProcess:
    """`policy` and `settings` are Python, evaluated in the new process next to our fakes."""

    def __init__(self, policy: str, settings: str = "") -> None:
        code = _PREFACE.format(root=str(ROOT), policy=policy, settings=settings)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.log: list[str] = []
        self._is_listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._is_listening.wait(START_S), "\n".join(self.log)
        self.url = re.findall(r"https?://127\.0\.0\.1:\d+", "\n".join(self.log))[0]
        self.http = httpx.Client(base_url=self.url, timeout=120)
        self.port = int(self.url.rsplit(":", 1)[1])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if "listening on" in line:
                self._is_listening.set()

    def wait_until_ready(self) -> None:
        pause = threading.Event()
        for _ in range(int(START_S / 0.02)):
            try:
                if self.http.get("/readyz").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            pause.wait(0.02)
        raise AssertionError("\n".join(self.log))

    def ended_with(self) -> int:
        code = self.process.wait(START_S)
        self._reader.join(START_S)
        return code

    def close(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()
        self._reader.join(START_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def serving(policy: str = "FakePolicy()", settings: str = "") -> Iterator[ServerProcess]:
    server = ServerProcess(policy, settings)
    try:
        yield server
    finally:
        server.close()
