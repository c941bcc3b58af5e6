"""What the server adds to a policy's own time, alone, in company and under overload.

`python -m scripts.bench_server` runs everything (about two minutes), naming sections runs those:
added, health, idle, sessions, overload. Every line ends in PASS or FAIL; those without a limit are
there to compare. Prints the load of the machine, because nothing here means much on a busy one.
"""

import argparse
import asyncio
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import websockets.sync.client

from deft_client import PolicyClient
from deft_client.peers.arrays import pack
from deft_client.stream import StreamClient
from deft_policies.base import ActAnswer, ActRequest
from deft_policies.constant import ConstantPolicy, SleepingPolicy
from deft_server.app import create_app
from deft_server.commands import serve
from deft_server.settings import Settings
from scripts.bench_server.load import (
    Load,
    frame,
    http_request,
    message,
    open_loop,
    sequential,
    sessions,
)
from scripts.bench_server.peers import FASTAPI, WEBSOCKETS, openvla_body, peer

SIZE = 256  # pixels: 196,608 bytes a frame
POLICY_MS = 20.0
WARM_UP = 50
MEGABYTE = 1024 * 1024


class HandedOverPolicy(ConstantPolicy):
    """Takes no time either, but does not say so: it is called on the policy thread."""

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        return super().act(batch)


class SpinningPolicy(ConstantPolicy):
    """Computes for a second in Python, and so holds the interpreter whenever it can."""

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        until_s = time.perf_counter() + 1.0
        while time.perf_counter() < until_s:
            pass
        return super().act(batch)


POLICIES = {
    "constant": ConstantPolicy,
    "handed over": HandedOverPolicy,
    "sleeping": partial(SleepingPolicy, sleep_s=POLICY_MS / 1000),
    "spinning": SpinningPolicy,
}


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    what: str
    measured: str
    limit: str
    is_met: bool


@dataclass(frozen=True)
class Server:
    """A server in a process of its own."""

    port: int
    process: psutil.Process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def resident_mb(self) -> float:
        return float(self.process.memory_info().rss) / MEGABYTE


@contextmanager
def serving(policy: str, **settings: int) -> Iterator[Server]:
    command = [sys.executable, "-m", "scripts.bench_server", "--serve", policy]
    command += ["--settings", json.dumps(settings)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    for line in child.stderr:
        if "listening on" in line:
            break
    port = int(line.strip().rsplit(":", 1)[1])
    server = Server(port, psutil.Process(child.pid))
    try:
        with PolicyClient(server.url) as client:
            client.info()
        yield server
    finally:
        child.terminate()
        child.wait()
        child.stderr.close()


def serve_policy(policy: str, settings: dict[str, int]) -> int:
    """Be the server."""
    chosen = Settings(port=0, log_format="text", log_level="info", **settings)  # type: ignore[arg-type]
    return serve.run(create_app(POLICIES[policy](), chosen))


def times_ms(work: Callable[[], object], count: int) -> np.ndarray:
    for _ in range(WARM_UP):
        work()
    took = []
    for _ in range(count):
        start_s = time.perf_counter()
        work()
        took.append((time.perf_counter() - start_s) * 1000)
    return np.array(took)


def spread(took_ms: np.ndarray) -> str:
    p50, p99 = np.percentile(took_ms, [50, 99])
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms"


def added_line(what: str, took_ms: np.ndarray, median_ms: float, p99_ms: float) -> Result:
    """Judge round trips to a policy that takes no time: all of them is added time."""
    p50, p99 = np.percentile(took_ms, [50, 99])
    limit = f"p50 <= {median_ms:g} ms" + (f", p99 <= {p99_ms:g} ms" if p99_ms < np.inf else "")
    return Result(what, spread(took_ms), limit, bool(p50 <= median_ms and p99 <= p99_ms))


def bench_added(_: argparse.Namespace) -> list[Result]:
    observation, body = frame(SIZE), message(SIZE)
    legacy_body = openvla_body(observation.image, observation.instruction)
    openpi_body = pack({"observation/image": observation.image, "prompt": "lift the cup"})
    with peer(WEBSOCKETS) as port:
        bare = time_stream(f"ws://127.0.0.1:{port}/", openpi_body, greets=False)
    with peer(FASTAPI) as port:
        peers_act = time_posts(port, "/act", legacy_body, "application/json")
    with serving("constant") as server:
        stream = time_stream(f"ws://127.0.0.1:{server.port}/v1/stream", body, greets=False)
        openpi = time_stream(f"ws://127.0.0.1:{server.port}/", openpi_body, greets=True)
        legacy = time_posts(server.port, "/act", legacy_body, "application/json")
        act = time_posts(server.port, "/v1/act", body, "application/msgpack", 2000)
        with PolicyClient(server.url) as client:
            sdk = times_ms(lambda: client.act(observation), 2000)
        with StreamClient(server.url) as client:
            sdk_stream = times_ms(lambda: client.act(observation), 1000)
    with serving("handed over") as server:
        handed = time_stream(f"ws://127.0.0.1:{server.port}/v1/stream", body, greets=False)
    return [
        added_line("/v1/stream, 1,000 in a row", stream, 0.4, np.inf),
        added_line("openpi WebSocket, 1,000 in a row", openpi, 0.4, np.inf),
        Result("... a bare server with openpi's architecture", spread(bare), "-", True),
        added_line("OpenVLA POST /act, 1,000 in a row", legacy, 3.0, np.inf),
        Result("... a bare server with OpenVLA's architecture", spread(peers_act), "-", True),
        added_line("POST /v1/act, 2,000 in a row", act, 2.0, 10.0),
        added_line("... through PolicyClient, its own time included", sdk, 2.0, 10.0),
        Result(
            "/v1/stream through StreamClient, its own time included", spread(sdk_stream), "-", True
        ),
        Result("/v1/stream, policy on its own thread", spread(handed), "-", True),
    ]


def time_posts(
    port: int, path: str, body: bytes, content_type: str, count: int = 1000
) -> np.ndarray:
    """Time posts over one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post() -> None:
        connection.request("POST", path, body, {"content-type": content_type})
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        reply.read()

    took_ms = times_ms(post, count)
    connection.close()
    return took_ms


def time_stream(url: str, body: bytes, greets: bool) -> np.ndarray:
    """Time round trips with the client library that openpi's own client uses."""
    with websockets.sync.client.connect(url, compression=None) as connection:
        if greets:
            connection.recv()

        def exchange() -> None:
            connection.send(body)
            reply = connection.recv()
            assert isinstance(reply, bytes), reply

        return times_ms(exchange, 1000)


def bench_health(_: argparse.Namespace) -> list[Result]:
    results = []
    for policy in ("sleeping", "spinning"):
        with serving(policy) as server:
            connection = http.client.HTTPConnection("127.0.0.1", server.port)

            def get(using: http.client.HTTPConnection = connection) -> None:
                using.request("GET", "/healthz")
                using.getresponse().read()

            idle = times_ms(get, 100)
            request = http_request(message(SIZE))
            with socket.create_connection(("127.0.0.1", server.port)) as caller:
                caller.sendall(request)
                time.sleep(0.01)
                busy = times_ms(get, 100)
        measured = f"max {busy.max():.2f} ms ({idle.max():.2f} ms when idle)"
        what = f"/healthz while the policy is {policy}"
        results.append(Result(what, measured, "max < 20 ms", bool(busy.max() < 20)))
    return results


def bench_idle(options: argparse.Namespace) -> list[Result]:
    with serving("constant") as server:
        before = server.process.cpu_times()
        time.sleep(options.seconds / 3)
        after = server.process.cpu_times()
    spent_s = after.user + after.system - before.user - before.system
    share = spent_s / (options.seconds / 3)
    what = "a core, while nobody asks and nobody looks at the dashboard"
    return [Result(what, f"{share:.2%}", "< 2%", share < 0.02)]


def bench_sessions(options: argparse.Namespace) -> list[Result]:
    with serving("sleeping", max_batch=1) as server:
        alone = run_sessions(server, 1, options.seconds / 6)
    with serving("sleeping", max_batch=8) as server:
        together = run_sessions(server, 16, options.seconds / 6)
    rate_alone, rate = (
        sum(load.count(200) for load in loads) * 6 / options.seconds for loads in (alone, together)
    )
    medians = [float(np.median(load.took_ms(200))) for load in together]
    errors = sum(len(load.replies) - load.count(200) for load in together)
    most_ms = 2 * POLICY_MS
    gain = rate / rate_alone
    return [
        Result(
            "16 sessions, policy of 20 ms, batch <= 8",
            f"{rate:.0f} actions/s, {gain:.1f}x one at a time ({rate_alone:.0f}/s)",
            ">= 6x",
            gain >= 6,
        ),
        Result(
            "... slowest session's median round trip",
            f"{max(medians):.1f} ms",
            f"<= {most_ms:g} ms (2 service times + max wait)",
            max(medians) <= most_ms,
        ),
        Result("... errors", str(errors), "0", errors == 0),
    ]


def run_sessions(server: Server, count: int, seconds: float) -> list[Load]:
    bodies = [message(SIZE, f"robot-{number}") for number in range(count)]
    return asyncio.run(sessions(server.port, bodies, seconds))


def bench_overload(options: argparse.Namespace) -> list[Result]:
    max_batch = 2
    capacity_per_s = max_batch * 1000 / POLICY_MS
    request = http_request(message(64))
    with serving("sleeping", max_batch=max_batch) as server:
        unloaded = asyncio.run(sequential(server.port, request, 200)).took_ms(200)
        memory = asyncio.run(watched(server, request, 3 * capacity_per_s, options.seconds))
        load, resident_mb = memory
        time.sleep(max(0.0, 2.0 - load.replies[-1].took_s))
        recovered = asyncio.run(sequential(server.port, request, 50)).took_ms(200)
    accepted, refused = load.took_ms(200), load.took_ms(429)
    others = len(load.replies) - len(accepted) - len(refused)
    p99, unloaded_p99 = np.percentile(accepted, 99), np.percentile(unloaded, 99)
    growth = max(resident_mb[10:]) / resident_mb[10] - 1 if len(resident_mb) > 10 else 0.0
    back = float(np.median(recovered) / np.median(unloaded))
    return [
        Result(
            f"overload, 3x capacity for {options.seconds:g} s, accepted",
            f"{len(accepted) / options.seconds:.0f}/s of {capacity_per_s:.0f}/s, p99 {p99:.1f} ms "
            f"({p99 / unloaded_p99:.2f}x unloaded {unloaded_p99:.1f} ms)",
            "p99 <= 3x unloaded",
            bool(p99 <= 3 * unloaded_p99),
        ),
        Result(
            "... refused with 429",
            f"{len(refused)} of {len(load.replies)}, {spread(refused)}, max {refused.max():.1f} ms",
            "p99 <= 50 ms",
            bool(np.percentile(refused, 99) <= 50),
        ),
        Result("... any other status", str(others), "0", others == 0),
        Result(
            "... memory after the first 10 s",
            f"{growth:+.1%} ({resident_mb[-1]:.0f} MB)",
            "<= +5%",
            growth <= 0.05,
        ),
        Result(
            "... 2 s after it ended",
            f"median {back:.2f}x of before",
            "<= 1.2x",
            back <= 1.2,
        ),
    ]


async def watched(
    server: Server, request: bytes, rate_per_s: float, seconds: float
) -> tuple[Load, list[float]]:
    """Run the overload and take the server's memory every second."""
    resident_mb = []

    async def watch() -> None:
        while True:
            resident_mb.append(server.resident_mb)
            await asyncio.sleep(1)

    watcher = asyncio.create_task(watch())
    load = await open_loop(server.port, [request], rate_per_s, seconds)
    watcher.cancel()
    return load, resident_mb


SECTIONS: dict[str, Callable[[argparse.Namespace], list[Result]]] = {
    "added": bench_added,
    "health": bench_health,
    "idle": bench_idle,
    "sessions": bench_sessions,
    "overload": bench_overload,
}


def main() -> int:
    parser = argparse.ArgumentParser("python -m scripts.bench_server", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--seconds", type=float, default=60, help="length of the overload [60]")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    parser.add_argument("--serve", choices=list(POLICIES), help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve_policy(options.serve, options.settings)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown section {sorted(unknown)[0]!r}; there are {', '.join(SECTIONS)}")
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f} before this")
    results = []
    for name in options.sections or SECTIONS:
        for result in SECTIONS[name](options):
            results.append(result)
            verdict = "PASS" if result.is_met else "FAIL"
            print(f"| {result.what} | {result.measured} | {result.limit} | {verdict} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1))
    return 0 if all(one.is_met for one in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
