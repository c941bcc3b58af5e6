"""What everybody else notices while a server is attacked: a robot, a probe, and the memory."""

import multiprocessing
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import httpx
import numpy as np

from deft_client.types import ActOptions, Observation
from deft_client.wire import msgpack_codec
from deft_client.wire.images import ImageEncoding
from deft_client.wire.messages import ActMessage
from scripts.attack.floods import run_flood
from scripts.attack.outcomes import AttackOutcome

MAX_GROWTH_MB = 100.0
MAX_HEALTH_MS = 500.0
MAX_ANSWER_MS = 2000.0
ROBOT_PERIOD_S = 0.1
HEALTH_PERIOD_S = 0.05
PATIENCE_S = 30.0
AFTERMATH_S = 0.3  # in which an attack is still felt
RESIDENT = re.compile(r"^process_resident_memory_bytes (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """A server of this machine, and how its callers know it."""

    url: str
    tls: ssl.SSLContext | None = None

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rsplit(":", 1)[1])

    def client(self) -> httpx.Client:
        """Return a client with one connection of its own."""
        return httpx.Client(base_url=self.url, verify=self.tls or True, timeout=PATIENCE_S)


@dataclass
class Noticed:
    """What the bystanders met."""

    health_ms: list[float] = field(default_factory=list)
    answer_ms: list[float] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def judged(self, before_mb: float) -> AttackOutcome:
        """Hold what was noticed against the bounds."""
        figures = {
            "growth_mb": round(max(self.resident_mb) - before_mb, 1),
            "health_ms": round(max(self.health_ms), 1),
            "robot_ms": round(max(self.answer_ms), 1),
            "frames": len(self.answer_ms),
        }
        most = {
            "growth_mb": MAX_GROWTH_MB, "health_ms": MAX_HEALTH_MS, "robot_ms": MAX_ANSWER_MS
        }  # fmt: skip
        faults = [f"{one} is {most[one]:g} or more" for one in most if figures[one] >= most[one]]
        return AttackOutcome(figures, (*faults, *self.failures))


def measure(target: Target, name: str | None, seconds: float, seed: int) -> Noticed:
    """Attack from a process of its own, or wait, and return what the others noticed."""
    if name is None:
        with watched(target) as noticed:
            time.sleep(seconds)
        return noticed
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)  # starting a process takes a core for a second
    arguments = (name, target.port, seconds, seed, start)
    attacker = context.Process(target=run_flood, args=arguments)
    attacker.start()
    start.wait(PATIENCE_S)
    with watched(target) as noticed:
        attacker.join()
        time.sleep(AFTERMATH_S)
    assert attacker.exitcode == 0, "the attack itself broke"
    return noticed


@contextmanager
def watched(target: Target) -> Iterator[Noticed]:
    """Ask for health and act like a robot for as long as the block lasts."""
    noticed, ended = Noticed(), threading.Event()
    with target.client() as robot, target.client() as probe:
        threads = [
            threading.Thread(target=_every, args=(HEALTH_PERIOD_S, ended, _ask(probe, noticed))),
            threading.Thread(target=_every, args=(ROBOT_PERIOD_S, ended, _act(robot, noticed))),
        ]
        for thread in threads:
            thread.start()
        try:
            yield noticed
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def _every(period_s: float, ended: threading.Event, work: Callable[[], None]) -> None:
    while not ended.wait(period_s):
        work()


def _act(robot: httpx.Client, noticed: Noticed) -> Callable[[], None]:
    image = np.random.default_rng(0).integers(0, 255, (128, 128, 3), np.uint8)
    message = ActMessage(Observation(image, "lift"), ActOptions(session_id="bystander"))
    frame = msgpack_codec.encode_request(message, ImageEncoding.PNG)
    headers = {"content-type": msgpack_codec.CONTENT_TYPE}

    def act() -> None:
        post = partial(robot.post, "/v1/act", content=frame, headers=headers)
        _timed(post, noticed.answer_ms, noticed.failures)

    return act


def _ask(probe: httpx.Client, noticed: Noticed) -> Callable[[], None]:
    def ask() -> None:
        _timed(lambda: probe.get("/healthz"), noticed.health_ms, noticed.failures)
        found = RESIDENT.search(probe.get("/metrics").text)
        assert found is not None
        noticed.resident_mb.append(float(found[1]) / 2**20)

    return ask


def _timed(call: Callable[[], httpx.Response], spent_ms: list[float], failures: list[str]) -> None:
    """Note how long a call took, and whether it was in vain."""
    started_s = time.monotonic()
    try:
        response = call()
    except httpx.TransportError as error:
        failures.append(repr(error))
    else:
        if response.status_code != 200:
            failures.append(f"{response.status_code} {response.text[:80]}")
    spent_ms.append((time.monotonic() - started_s) * 1000)
