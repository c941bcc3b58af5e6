"""Plays against a server for an hour and watches what it holds: memory, open files, sessions.

python -m scripts.soak --minutes 60
python -m scripts.soak --minutes 2 --policy constant

Robots come and go as they do in a lab: over HTTP and WebSocket, some without a goodbye, some
hanging up before their answer, some sending what is no request. What grows meanwhile is a leak: the
medians of the last quarter stand beside those of the second, and when all have left nothing may
stay. Exit code 1 names what grew.
"""

import argparse
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from uuid import uuid4

import httpx
import numpy as np

from deft_client import ClientSettings, PolicyClient
from deft_client.settings import Timeouts
from deft_client.stream import StreamClient
from deft_core.errors import DeftError
from deft_core.types import ActOptions, Observation
from deft_core.wire.codec import encode_request
from deft_core.wire.formats import WireFormat
from deft_core.wire.messages import ActMessage
from scripts.local_server import local_server, port_of, read_metric

PROG = "python -m scripts.soak"
_FRAMES_A_SESSION = 20
_CONTENT_TYPE = WireFormat.MSGPACK.value
_TTL_S = 5.0  # of sessions that nobody ends: they have to go while the soak still runs
_INSTRUCTION = "pick up the butter and place it in the basket"
_SETTINGS = ClientSettings(Timeouts(answer_s=120.0))


@dataclass(frozen=True)
class Sample:
    """What the server holds at one moment."""

    at_s: float
    memory_mb: float
    open_files: float
    sessions: float
    answered: int = 0


@dataclass(frozen=True)
class Limits:
    """By how much each may grow from the second quarter of the samples to the last."""

    memory_mb: float = 64.0
    open_files: float = 16.0
    sessions: float = 64.0


def find_growth(samples: Sequence[Sample], limits: Limits) -> list[str]:
    """What grew by more than it may; `samples` are at even distances."""
    quarter = max(1, len(samples) // 4)
    before, after = samples[quarter : 2 * quarter] or samples[:1], samples[-quarter:]
    found = []
    for name, limit in asdict(limits).items():
        was, now = (median(getattr(one, name) for one in some) for some in (before, after))
        if now - was > limit:
            found.append(f"{name} grew from {was:.0f} to {now:.0f}: at most {limit:.0f} more")
    return found


def find_leftovers(first: Sample, last: Sample, limits: Limits) -> list[str]:
    """What is left when every robot has gone and every session has ended."""
    found = []
    if last.sessions:
        found.append(f"{last.sessions:.0f} sessions are left, and nobody has one")
    if last.open_files - first.open_files > limits.open_files:
        found.append(
            f"{last.open_files:.0f} files are open, {first.open_files:.0f} before the first robot"
        )
    return found


class Robots:
    """Threads that play until they are told to stop. `counts` says what became of their frames."""

    def __init__(self, url: str) -> None:
        self.url, self.counts = url, Counter[str]()
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        lives = (self._by_http, self._by_stream, self._forget, self._hang_up, self._talk_nonsense)
        self._threads = [threading.Thread(target=self._live, args=(one,)) for one in lives]

    def start(self) -> None:
        """Let every robot begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let every robot finish the frame in hand, and wait for it."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _live(self, life: Callable[[int], None]) -> None:
        number = 0
        while not self._is_over.is_set():
            try:
                life(number)
            except (DeftError, OSError, httpx.HTTPError) as error:
                self._count(f"{life.__name__[1:]}: {type(error).__name__}")
                self._is_over.wait(0.1)
            number += 1

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _by_http(self, number: int) -> None:
        with PolicyClient(self.url, _SETTINGS) as client:
            self._play(client, f"http-{uuid4().hex}")

    def _by_stream(self, number: int) -> None:
        with StreamClient(self.url, _SETTINGS) as client:
            self._play(client, f"stream-{uuid4().hex}")

    def _play(self, client: PolicyClient, session: str) -> None:
        for step in range(_FRAMES_A_SESSION):
            if self._is_over.is_set():
                break
            client.act(_frame(step), ActOptions(session_id=session))
            self._count("answered")
        client.reset(session)

    def _forget(self, number: int) -> None:
        """A session that nobody ends: it goes when its time is over."""
        with PolicyClient(self.url, _SETTINGS) as client:
            client.act(_frame(number), ActOptions(session_id=f"forgotten-{uuid4().hex}"))
        self._count("answered")
        self._is_over.wait(0.2)

    def _hang_up(self, number: int) -> None:
        """A request whose caller goes before its answer comes."""
        body = encode_request(ActMessage(_frame(number), ActOptions(session_id="hangs-up")))
        with socket.create_connection(("127.0.0.1", port_of(self.url))) as connection:
            connection.sendall(
                f"POST /v1/act HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {_CONTENT_TYPE}\r\n"
                f"content-length: {len(body)}\r\n\r\n".encode()
            )
            connection.sendall(body[: len(body) // (1 + number % 2)])
        self._count("hung up")
        self._is_over.wait(0.2)

    def _talk_nonsense(self, number: int) -> None:
        answer = httpx.post(
            f"{self.url}/v1/act", content=b"\xff" * (number % 2048), timeout=120.0,
            headers={"content-type": _CONTENT_TYPE},
        )  # fmt: skip
        self._count(f"nonsense: {answer.status_code}")
        self._is_over.wait(0.2)


def _frame(number: int) -> Observation:
    """A picture that is another one at every step."""
    rng = np.random.default_rng(number)
    image = rng.integers(0, 256, (224, 224, 3), dtype=np.uint8)
    return Observation(image, _INSTRUCTION, state=np.zeros(8, np.float32))


def _sample(url: str, start_s: float, answered: int = 0) -> Sample:
    text = httpx.get(f"{url}/metrics", timeout=120.0).text
    return Sample(
        time.monotonic() - start_s,
        read_metric(text, "process_resident_memory_bytes") / 2**20,
        read_metric(text, "process_open_fds"),
        read_metric(text, "deft_sessions"),
        answered,
    )


def soak(url: str, seconds: float, every_s: float) -> tuple[list[Sample], Sample, Counter[str]]:
    """Samples from before the first robot on; the last one is of when all had gone."""
    start_s = time.monotonic()
    samples, robots = [_sample(url, start_s)], Robots(url)
    robots.start()
    try:
        while (left_s := start_s + seconds - time.monotonic()) > 0:
            time.sleep(min(every_s, left_s))
            samples.append(_sample(url, start_s, robots.counts["answered"]))
            _say(samples[-1])
    finally:
        robots.stop()
    return samples, _when_empty(url, start_s, robots.counts["answered"]), robots.counts


def _when_empty(url: str, start_s: float, answered: int) -> Sample:
    """When the sessions that nobody ended had time to go: they do so before the next frame."""
    time.sleep(_TTL_S + 1.0)
    with PolicyClient(url, _SETTINGS) as client:
        client.act(_frame(0), ActOptions(session_id="last"))
        client.reset("last")
    time.sleep(1.0)
    return _sample(url, start_s, answered)


def _say(one: Sample) -> None:
    sys.stderr.write(
        f"{one.at_s:6.0f} s: {one.memory_mb:.0f} MB, {one.open_files:.0f} open files, "
        f"{one.sessions:.0f} sessions, {one.answered} answers\n"
    )


def main(arguments: list[str]) -> int:
    """Soak; return 1 where something grew or was left."""
    given = _parser().parse_args(arguments)
    limits = Limits(memory_mb=given.memory_mb)
    flags = ("--policy", given.policy, "--session-ttl-s", str(_TTL_S))
    with local_server(*flags) as url:
        samples, last, counts = soak(url, 60 * given.minutes, given.every)
    _say(last)
    found = find_growth(samples[1:], limits) + find_leftovers(samples[0], last, limits)
    if not counts["answered"]:
        found.append("not one frame was answered")
    if given.json is not None:
        told = {"samples": [asdict(one) for one in (*samples, last)], "counts": counts}
        given.json.write_text(json.dumps({**told, "found": found}, indent=2) + "\n")
    sys.stdout.write(f"{dict(sorted(counts.items()))}\n")
    sys.stdout.write("".join(f"{one}\n" for one in found) or "nothing grew, and nothing was left\n")
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROG, description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="(default: %(default)g)")
    parser.add_argument("--policy", default="tiny-libero", help="(default: %(default)s)")
    parser.add_argument(
        "--every", type=float, default=5.0, metavar="SECONDS", help="(default: %(default)g)"
    )
    parser.add_argument(
        "--memory-mb", type=float, default=Limits.memory_mb, metavar="MB",
        help="by how much memory may grow (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there, too")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
