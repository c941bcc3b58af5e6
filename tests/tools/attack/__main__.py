"""Floods servers of this machine over real sockets, and tells what held.

python -m tests.tools.attack [--seconds 5] [--only pings] [--seed 0]

Floods come from another address, each from a process of its own: for every one of them how much the
server's memory grew, the worst answer of /healthz, and the worst answer to a robot that sends a
picture ten times a second. What hundreds of connections can do is tried through nginx with the
files of deploy/nginx. Attacks that are no floods (names, keys, disks, answers that are no numbers)
are in the tests. Ends with 1 if one was not borne.
"""

import argparse
import multiprocessing
import shutil
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from deft_core.types import ActOptions, Observation
from deft_core.wire import codec
from deft_core.wire.formats import WireFormat
from deft_core.wire.images import ImageEncoding
from deft_core.wire.messages import ActMessage
from scripts.local_server import local_server, port_of, read_metric
from tests.server.nginx import nginx_before
from tests.tools.attack.floods import FLOODS, PROXY_FLOODS, TLS_FLOODS, run_flood

WARM_S, CALM_S = 2.0, 3.0
MOST = {"growth_mb": 100.0, "health_ms": 500.0, "robot_ms": 2000.0}
ROBOT_PERIOD_S, HEALTH_PERIOD_S = 0.1, 0.05
PATIENCE_S = 30.0
AFTERMATH_S = 0.3  # in which an attack is still felt


@dataclass
class Noticed:
    """What a robot and a probe met while a server was attacked."""

    health_ms: list[float] = field(default_factory=list)
    answer_ms: list[float] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def timed(self, call: Callable[[], httpx.Response], spent_ms: list[float]) -> None:
        """Note how long a call took, and whether it was in vain."""
        started_s = time.monotonic()
        try:
            response = call()
        except httpx.TransportError as error:
            self.failures.append(repr(error))
        else:
            if response.status_code != 200:
                self.failures.append(f"{response.status_code} {response.text[:80]}")
        spent_ms.append((time.monotonic() - started_s) * 1000)


def main() -> int:
    """Attack; return 0 if everything was borne."""
    parser = argparse.ArgumentParser(prog="tests.tools.attack", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of every flood [5]")
    parser.add_argument("--only", default="", help="attacks whose name holds this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default="constant", help="constant: only the server is tried")
    options = parser.parse_args()
    verdicts = []
    for name, figures, faults in _outcomes(options):
        verdict = "FAIL" if faults else "PASS" if figures else "SKIP"
        told = "  ".join(f"{key} {value:g}" for key, value in figures.items())
        line = f"{verdict}  {name:38} {told}  {'; '.join(faults[:2])}".rstrip()
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        verdicts.append(verdict)
    return 1 if "FAIL" in verdicts else 0


Outcome = tuple[str, dict[str, float], list[str]]  # name, what was measured, what is wrong


def _outcomes(options: argparse.Namespace) -> Iterator[Outcome]:
    flags = ("--policy", options.policy)
    if any(options.only in name for name in FLOODS):
        with local_server(*flags) as url:
            yield from _flooded(url, None, list(FLOODS), options)
    if any(options.only in name for name in PROXY_FLOODS | TLS_FLOODS):
        if shutil.which("nginx") is None:
            yield "floods of the proxy: nginx is not installed", {}, []
            return
        with (
            local_server(*flags, "--trusted-proxies", "127.0.0.1") as url,
            tempfile.TemporaryDirectory() as folder,
            nginx_before(port_of(url), Path(folder)) as proxy,
        ):
            tls = ssl.create_default_context(cafile=proxy.certificate)
            yield from _flooded(proxy.url, None, list(PROXY_FLOODS), options)
            yield from _flooded(proxy.tls_url, tls, list(TLS_FLOODS), options)


def _flooded(
    url: str, tls: ssl.SSLContext | None, names: list[str], options: argparse.Namespace
) -> Iterator[Outcome]:
    _measure(url, tls, None, WARM_S, 0)
    calm = _measure(url, tls, None, CALM_S, 0)
    before_mb = max(calm.resident_mb)
    yield _judged("no attack", calm, before_mb)
    for name in names:
        if options.only in name:
            found = _measure(url, tls, name, options.seconds, options.seed)
            yield _judged(name, found, before_mb)


def _judged(name: str, noticed: Noticed, before_mb: float) -> Outcome:
    """Hold what was noticed against the bounds."""
    figures = {
        "growth_mb": round(max(noticed.resident_mb) - before_mb, 1),
        "health_ms": round(max(noticed.health_ms), 1),
        "robot_ms": round(max(noticed.answer_ms), 1),
        "frames": float(len(noticed.answer_ms)),
    }
    faults = [f"{one} is {most:g} or more" for one, most in MOST.items() if figures[one] >= most]
    return name, figures, [*faults, *noticed.failures]


def _measure(
    url: str, tls: ssl.SSLContext | None, name: str | None, seconds: float, seed: int
) -> Noticed:
    """Attack from a process of its own, or wait, and return what the others noticed."""
    if name is None:
        with _watched(url, tls) as noticed:
            time.sleep(seconds)
        return noticed
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)  # starting a process takes a core for a second
    port = port_of(url)
    attacker = context.Process(target=run_flood, args=(name, port, seconds, seed, start))
    attacker.start()
    start.wait(PATIENCE_S)
    with _watched(url, tls) as noticed:
        attacker.join()
        time.sleep(AFTERMATH_S)
    assert attacker.exitcode == 0, "the attack itself broke"
    return noticed


@contextmanager
def _watched(url: str, tls: ssl.SSLContext | None) -> Iterator[Noticed]:
    """Ask for health and act like a robot for as long as the block lasts."""
    noticed, ended = Noticed(), threading.Event()
    image = np.random.default_rng(0).integers(0, 255, (128, 128, 3), np.uint8)
    message = ActMessage(Observation(image, "lift"), ActOptions(session_id="bystander"))
    frame = codec.encode_request(message, ImageEncoding.PNG)
    headers = {"content-type": WireFormat.MSGPACK.value}
    robot, probe = (
        httpx.Client(base_url=url, verify=tls or True, timeout=PATIENCE_S) for _ in range(2)
    )

    def act() -> None:
        while not ended.wait(ROBOT_PERIOD_S):
            noticed.timed(
                lambda: robot.post("/v1/act", content=frame, headers=headers), noticed.answer_ms
            )

    def ask() -> None:
        while not ended.wait(HEALTH_PERIOD_S):
            noticed.timed(lambda: probe.get("/healthz"), noticed.health_ms)
            resident = read_metric(probe.get("/metrics").text, "process_resident_memory_bytes")
            noticed.resident_mb.append(resident / 2**20)

    threads = [threading.Thread(target=work) for work in (act, ask)]
    with robot, probe:
        for thread in threads:
            thread.start()
        try:
            yield noticed
        finally:
            ended.set()
            for thread in threads:
                thread.join()


if __name__ == "__main__":
    raise SystemExit(main())
