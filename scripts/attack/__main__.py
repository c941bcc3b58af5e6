"""Attacks a server of this machine over real sockets, and measures what others notice of it.

python -m scripts.attack [--seconds 5] [--only pings] [--seed 0]

For every attack: how much the server's memory grew, the worst answer of /healthz, and the worst
answer to a robot that sends a picture ten times a second. Ends with 1 beyond the bounds below.
"""

import argparse
import multiprocessing
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import numpy as np

from deft_client.types import ActOptions, Observation
from deft_client.wire import msgpack_codec
from deft_client.wire.images import ImageEncoding
from deft_client.wire.messages import ActMessage
from deft_server.reproduce.local_server import local_server
from scripts.attack.floods import FLOODS, run_flood

MAX_GROWTH_MB = 100.0
MAX_HEALTH_S = 0.5
MAX_ANSWER_S = 2.0
ROBOT_PERIOD_S = 0.1
HEALTH_PERIOD_S = 0.05
HELD_BYTES = 32 * 1024**2
RESIDENT = re.compile(r"^process_resident_memory_bytes (\S+)", re.MULTILINE)


@dataclass
class Noticed:
    """What everybody else notices of an attack."""

    health_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def _frame() -> bytes:
    image = np.random.default_rng(0).integers(0, 255, (128, 128, 3), np.uint8)
    message = ActMessage(Observation(image, "lift"), ActOptions(session_id="bystander"))
    return msgpack_codec.encode_request(message, ImageEncoding.PNG)


def _every(period_s: float, ended: threading.Event, act: Callable[[], None]) -> None:
    while not ended.wait(period_s):
        act()


@contextmanager
def watched(url: str, noticed: Noticed) -> Iterator[None]:
    """Ask for health and act like a robot for as long as the block lasts."""
    ended = threading.Event()
    frame = _frame()
    headers = {"content-type": msgpack_codec.CONTENT_TYPE}
    with httpx.Client(base_url=url, timeout=30) as robot, httpx.Client(base_url=url) as probe:

        def act() -> None:
            _timed(noticed.answer_s, lambda: robot.post("/v1/act", content=frame, headers=headers))

        def ask() -> None:
            _timed(noticed.health_s, lambda: probe.get("/healthz", timeout=30))
            found = RESIDENT.search(probe.get("/metrics", timeout=30).text)
            assert found is not None
            noticed.resident_mb.append(float(found[1]) / 2**20)

        def _timed(spent_s: list[float], call: Callable[[], httpx.Response]) -> None:
            started_s = time.monotonic()
            try:
                response = call()
            except httpx.TransportError as error:
                noticed.failures.append(repr(error))
            else:
                if response.status_code != 200:
                    noticed.failures.append(f"{response.status_code} {response.text[:80]}")
            spent_s.append(time.monotonic() - started_s)

        threads = [
            threading.Thread(target=_every, args=(HEALTH_PERIOD_S, ended, ask)),
            threading.Thread(target=_every, args=(ROBOT_PERIOD_S, ended, act)),
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def measure(url: str, name: str | None, seconds: float, seed: int) -> Noticed:
    """Attack from a process of its own, and return what the others noticed."""
    noticed = Noticed()
    port = int(url.rsplit(":", 1)[1])
    with watched(url, noticed):
        if name is None:
            time.sleep(seconds)
        else:
            attacker = multiprocessing.get_context("spawn").Process(
                target=run_flood, args=(name, port, seconds, seed)
            )
            attacker.start()
            attacker.join()
            assert attacker.exitcode == 0, "the attack itself broke"
            time.sleep(0.3)  # what it left behind
    return noticed


def tell(name: str, noticed: Noticed, before_mb: float) -> bool:
    """Print one line; return whether it is within the bounds."""
    growth_mb = max(noticed.resident_mb) - before_mb
    health_s, answer_s = max(noticed.health_s), max(noticed.answer_s)
    is_good = (
        growth_mb < MAX_GROWTH_MB
        and health_s < MAX_HEALTH_S
        and answer_s < MAX_ANSWER_S
        and not noticed.failures
    )
    sys.stdout.write(
        f"{name:34} +{growth_mb:6.1f} MB   /healthz {health_s * 1000:7.1f} ms   "
        f"robot {answer_s * 1000:7.1f} ms of {len(noticed.answer_s)}   "
        f"{'held' if is_good else 'NOT HELD'} {noticed.failures[:1] or ''}\n"
    )
    sys.stdout.flush()
    return is_good


def main() -> int:
    """Attack; return 0 if the bounds held."""
    parser = argparse.ArgumentParser(prog="scripts.attack", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of every attack [5]")
    parser.add_argument("--only", default="", help="attacks whose name holds this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default="constant", help="constant: only the server is tried")
    options = parser.parse_args()
    sys.stdout.write(f"seed {options.seed}, {options.seconds:g} s each\n")
    flags = ("--policy", options.policy, "--max-total-bytes", str(HELD_BYTES))
    with local_server(*flags) as url:
        measure(url, None, 2.0, options.seed)  # warm
        calm = measure(url, None, 3.0, options.seed)
        before_mb = max(calm.resident_mb)
        held = [tell("no attack", calm, before_mb)]
        for name in FLOODS:
            if options.only in name:
                noticed = measure(url, name, options.seconds, options.seed)
                held.append(tell(name, noticed, before_mb))
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())
