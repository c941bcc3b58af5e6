"""What the server adds to a policy's own time: alone, in company, under overload, with replicas.

`python -m scripts.bench server` runs everything but replicas (about two minutes), naming sections
runs those: added, health, idle, sessions, overload, several, replicas (on a Ray of its own). Every
line ends in PASS or FAIL; those without a limit are there to compare. Prints the load of the
machine, because nothing here means much on a busy one. `deft-client load` asks a server of yours.
"""

import argparse
import asyncio
import base64
import http.client
import json
import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import websockets.asyncio.client
import websockets.sync.client
from PIL import Image

from deft_client import ActionChunk, ActOptions, DeftError, Observation, PolicyClient
from deft_client.stream import StreamClient
from deft_core.errors import Problem
from deft_core.peers.arrays import pack
from deft_core.wire.codec import encode_request
from deft_core.wire.formats import WireFormat, decode
from deft_core.wire.messages import ActMessage
from deft_policies.tiny_libero import STATISTICS_KEY
from deft_server.replicas.ray_serve import import_ray
from scripts.local_server import ask_metric, local_server, port_of, resident_mb

SIZE = 256  # pixels: 196,608 bytes a frame
POLICY_MS = 20.0
WARM_UP = 50
CPU = "process_cpu_seconds_total"
SEVERAL, SEVERAL_STEPS = 8, 20
EXAMPLE = Path(__file__).parents[2] / "examples" / "frame.png"
INSTRUCTION = "pick up the butter and place it in the basket"


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    what: str
    measured: str
    limit: str
    is_met: bool


def serving(policy: str, *flags: str) -> AbstractContextManager[str]:
    """Run `deft serve` with a policy; the block has the URL."""
    return local_server("--policy", policy, *flags)


Load = defaultdict[int, list[float]]  # by status: milliseconds from a request to its answer


def count_all(load: Load) -> int:
    """Answers of any status."""
    return sum(map(len, load.values()))


def frame(size: int) -> Observation:
    rng = np.random.default_rng(0)
    return Observation(rng.integers(0, 256, (size, size, 3), dtype=np.uint8), "lift the cup")


def message(size: int, session_id: str | None = None) -> bytes:
    return encode_request(ActMessage(frame(size), ActOptions(session_id=session_id)))


def http_request(body: bytes) -> bytes:
    head = (
        "POST /v1/act HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/msgpack\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection:
    """One kept HTTP connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> int:
        """Send a request and return the status of its answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
        return int(head.split(b" ", 2)[1])

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def open_loop(
    port: int, requests: Sequence[bytes], rate_per_s: float, seconds: float
) -> Load:
    """Send at a fixed rate whatever the answers do: callers in turn that know nothing of others."""
    load, idle, tasks = Load(list), list[Connection](), set[asyncio.Task[None]]()
    start_s = time.perf_counter()

    async def one(sent_s: float, request: bytes) -> None:
        connection = idle.pop() if idle else Connection(port)
        status = await connection.ask(request)
        idle.append(connection)
        load[status].append((time.perf_counter() - sent_s) * 1000)

    for number in range(int(rate_per_s * seconds)):
        due_s = start_s + number / rate_per_s
        while (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        task = asyncio.create_task(one(time.perf_counter(), requests[number % len(requests)]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return load


async def sequential(port: int, request: bytes, count: int) -> Load:
    """Send one request after the other."""
    load, connection = Load(list), Connection(port)
    for _ in range(count):
        sent_s = time.perf_counter()
        status = await connection.ask(request)
        load[status].append((time.perf_counter() - sent_s) * 1000)
    connection.close()
    return load


async def sessions(port: int, bodies: Sequence[bytes], seconds: float) -> list[Load]:
    """Stream from one robot per body, each sending again as soon as it is answered.

    One that is refused waits as it is told to: else refusals alone would keep the server busy.
    """
    start_s = time.perf_counter()

    async def robot(body: bytes) -> Load:
        load = Load(list)
        async with websockets.asyncio.client.connect(
            f"ws://127.0.0.1:{port}/v1/stream", compression=None
        ) as socket:
            while (sent_s := time.perf_counter()) < start_s + seconds:
                await socket.send(body)
                reply = await socket.recv()
                took_ms, status = (time.perf_counter() - sent_s) * 1000, 200
                if isinstance(reply, str):
                    problem = decode(reply.encode(), Problem, WireFormat.JSON)
                    status = problem.status
                    await asyncio.sleep(problem.retry_after_s or 0.0)
                load[status].append(took_ms)
        return load

    return await asyncio.gather(*(robot(body) for body in bodies))


def openvla_body(image: np.ndarray, instruction: str) -> bytes:
    """Return what OpenVLA's own client sends."""
    data = base64.b64encode(image.tobytes()).decode()
    encoded = {"__numpy__": data, "dtype": "|u1", "shape": list(image.shape)}
    return json.dumps({"image": encoded, "instruction": instruction}).encode()


def times_ms(work: Callable[[], object], count: int) -> np.ndarray:
    for _ in range(WARM_UP):
        work()
    took = []
    for _ in range(count):
        start_s = time.perf_counter()
        work()
        took.append((time.perf_counter() - start_s) * 1000)
    return np.array(took)


def spread(took_ms: np.ndarray | list[float]) -> str:
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
    with serving("constant") as url:
        port = port_of(url)
        stream = time_stream(f"ws://127.0.0.1:{port}/v1/stream", body, greets=False)
        openpi = time_stream(f"ws://127.0.0.1:{port}/", openpi_body, greets=True)
        legacy = time_posts(port, "/act", legacy_body, "application/json")
        act = time_posts(port, "/v1/act", body, "application/msgpack", 2000)
        with PolicyClient(url) as client:
            sdk = times_ms(lambda: client.act(observation), 2000)
        with StreamClient(url) as client:
            sdk_stream = times_ms(lambda: client.act(observation), 1000)
    return [
        added_line("/v1/stream, 1,000 in a row", stream, 0.4, np.inf),
        added_line("openpi WebSocket, 1,000 in a row", openpi, 0.4, np.inf),
        added_line("OpenVLA POST /act, 1,000 in a row", legacy, 3.0, np.inf),
        added_line("POST /v1/act, 2,000 in a row", act, 2.0, 10.0),
        added_line("... through PolicyClient, its own time included", sdk, 2.0, 10.0),
        Result(
            "/v1/stream through StreamClient, its own time included", spread(sdk_stream), "-", True
        ),
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
    with serving("sleeping") as url:
        connection = http.client.HTTPConnection("127.0.0.1", port_of(url))

        def get() -> None:
            connection.request("GET", "/healthz")
            connection.getresponse().read()

        idle = times_ms(get, 100)
        request = http_request(message(SIZE))
        with socket.create_connection(("127.0.0.1", port_of(url))) as caller:
            caller.sendall(request)
            time.sleep(0.01)
            busy = times_ms(get, 100)
    measured = f"max {busy.max():.2f} ms ({idle.max():.2f} ms when idle)"
    what = "/healthz while the policy works"
    return [Result(what, measured, "max < 20 ms", bool(busy.max() < 20))]


def bench_idle(options: argparse.Namespace) -> list[Result]:
    with serving("constant") as url:
        before_s = ask_metric(url, CPU)
        time.sleep(options.seconds / 3)
        share = (ask_metric(url, CPU) - before_s) / (options.seconds / 3)
    what = "a core, while nobody asks and nobody looks at the dashboard"
    return [Result(what, f"{share:.2%}", "< 2%", share < 0.02)]


def bench_sessions(options: argparse.Namespace) -> list[Result]:
    sleeping = ("--sleep-ms", str(POLICY_MS), "--max-batch")
    with serving("sleeping", *sleeping, "1") as url:
        alone = run_sessions(url, 1, options.seconds / 6)
    with serving("sleeping", *sleeping, "8") as url:
        together = run_sessions(url, 16, options.seconds / 6)
    rate_alone, rate = (
        sum(len(load[200]) for load in loads) * 6 / options.seconds for loads in (alone, together)
    )
    medians = [float(np.median(load[200])) for load in together]
    errors = sum(count_all(load) - len(load[200]) for load in together)
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


def run_sessions(url: str, count: int, seconds: float) -> list[Load]:
    bodies = [message(SIZE, f"robot-{number}") for number in range(count)]
    return asyncio.run(sessions(port_of(url), bodies, seconds))


def bench_overload(options: argparse.Namespace) -> list[Result]:
    max_batch = 2
    capacity_per_s = max_batch * 1000 / POLICY_MS
    request = http_request(message(64))
    flags = ("--sleep-ms", str(POLICY_MS), "--max-batch", str(max_batch))
    with serving("sleeping", *flags) as url:
        port = port_of(url)
        unloaded = asyncio.run(sequential(port, request, 200))[200]
        rate_per_s = 3 * capacity_per_s
        settling = asyncio.run(open_loop(port, [request], rate_per_s, options.seconds / 6))
        before_mb = resident_mb(url)
        load = asyncio.run(open_loop(port, [request], rate_per_s, options.seconds))
        after_mb = resident_mb(url)
        time.sleep(2.0)
        recovered = asyncio.run(sequential(port, request, 50))[200]
    accepted, refused, asked = load[200], load[429], count_all(load)
    others = asked - len(accepted) - len(refused)
    p99, unloaded_p99 = np.percentile(accepted, 99), np.percentile(unloaded, 99)
    growth = after_mb / before_mb - 1
    back = float(np.median(recovered) / np.median(unloaded))
    how_soon = f", {spread(refused)}, max {max(refused):.1f} ms" if refused else ""
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
            f"{len(refused)} of {asked}{how_soon}",
            "p99 <= 50 ms",
            bool(refused and np.percentile(refused, 99) <= 50),
        ),
        Result("... any other status", str(others), "0", others == 0),
        Result(
            f"... memory after the first {count_all(settling)} frames",
            f"{growth:+.1%} ({after_mb:.0f} MB)",
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


def bench_several(_: argparse.Namespace) -> list[Result]:
    """A step of eight robots in one message and in eight, in turn, by the shipped policy."""
    results = []
    flags = ("--policy", "tiny-libero", "--threads", "1", "--statistics-key", STATISTICS_KEY)
    with local_server(*flags) as url, PolicyClient(url) as client:
        for method in ("autoregressive", "lossless"):
            alone_ms, together_ms, different = time_several(client, method)
            what = f"{SEVERAL} observations in one message, {method}"
            measured = (
                f"{sum(together_ms) / sum(alone_ms):.2f} of the time of {SEVERAL} messages, sums "
                f"of {len(alone_ms)} steps; {different} answers differ"
            )
            results.append(Result(what, measured, "none differ", different == 0))
    return results


def time_several(client: PolicyClient, method: str) -> tuple[list[float], list[float], int]:
    """Milliseconds of every step one by one and at once, and how many answers differ.

    What the robots see is the example picture as cameras see it that pan.
    """
    with Image.open(EXAMPLE) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    spent_ms: dict[str, list[float]] = {"alone": [], "together": []}
    different = 0
    for step in range(SEVERAL_STEPS):
        seen = [
            Observation(np.roll(pixels, 2 * step + 11 * one, axis=1), INSTRUCTION)
            for one in range(SEVERAL)
        ]
        answers: dict[str, list[ActionChunk | DeftError]] = {}
        for way in ("alone", "together") if step % 2 else ("together", "alone"):
            named = {f"{method} {way} {at}": one for at, one in enumerate(seen)}
            options = ActOptions(decoding=method)
            started_s = time.perf_counter()
            if way == "together":
                answers[way] = list(client.act_all(named, options).values())
            else:
                answers[way] = [
                    client.act(one, replace(options, session_id=name))
                    for name, one in named.items()
                ]
            spent_ms[way].append((time.perf_counter() - started_s) * 1000)
        for pair in zip(*answers.values(), strict=True):
            actions = [one.actions for one in pair if isinstance(one, ActionChunk)]
            different += len(actions) < 2 or not np.array_equal(actions[0], actions[1])
    return spent_ms["alone"], spent_ms["together"], different


def bench_replicas(options: argparse.Namespace) -> list[Result]:
    """Sixteen sessions on one replica and on two, and what a replica adds to a frame."""
    with own_ray() as ray:
        rates = {count: replica_rate(ray, count, options.seconds / 3) for count in (1, 2)}
        near, far = replica_times(ray)
    ratio, added_ms = rates[2] / rates[1], float(np.median(far) - np.median(near))
    measured = f"{rates[1]:.1f} and {rates[2]:.1f} frames/s, {ratio:.2f}x"
    return [
        Result("one replica and two, 16 sessions", measured, ">= 1.9x", ratio >= 1.9),
        Result("a frame on a thread", spread(near), "-", True),
        Result(
            "a frame on a replica",
            f"{spread(far)}; {added_ms:.2f} ms added",
            "median <= 3 ms added",
            added_ms <= 3,
        ),
    ]


@contextmanager
def replicas(ray: str, count: int, sleep_ms: float) -> Iterator[str]:
    """A server with so many replicas on the Ray of an address, once all of them answer."""
    flags = ("--replicas", str(count), "--ray", ray, "--replica-cpus=0.1", "--max-batch", "1")
    try:
        with serving("sleeping", "--sleep-ms", str(sleep_ms), *flags) as url:
            gives_up_s = time.monotonic() + 120
            while ask_metric(url, "deft_replicas") != count:
                if time.monotonic() > gives_up_s:
                    raise SystemExit(f"{url} never had {count} replicas")
                time.sleep(0.1)
            yield url
    finally:
        import_ray()[1].shutdown()  # or the next would begin with these replicas


def replica_rate(ray: str, count: int, seconds: float) -> float:
    """Frames a second of sixteen sessions that ask again as soon as they are answered."""
    bodies = [message(64, f"s{number}") for number in range(16)]
    with replicas(ray, count, 50) as url:
        loads = asyncio.run(sessions(port_of(url), bodies, seconds))
    return sum(len(load[200]) for load in loads) / seconds


def replica_times(ray: str) -> tuple[np.ndarray, np.ndarray]:
    """The same frame of 200 kB to a policy on a thread and to one replica."""
    body = message(258, "s")
    with serving("sleeping", "--sleep-ms", "0.5", "--max-batch", "1") as url:
        near = time_stream(f"ws://127.0.0.1:{port_of(url)}/v1/stream", body, greets=False)
    with replicas(ray, 1, 0.5) as url:
        far = time_stream(f"ws://127.0.0.1:{port_of(url)}/v1/stream", body, greets=False)
    return near, far


@contextmanager
def own_ray() -> Iterator[str]:
    """Start Ray with room for eight small replicas, yield its address, and end it."""
    ray, _ = import_ray()
    context = ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        configure_logging=False,
        logging_level=logging.WARNING,
    )
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()


SECTIONS: dict[str, Callable[[argparse.Namespace], list[Result]]] = {
    "added": bench_added,
    "health": bench_health,
    "idle": bench_idle,
    "sessions": bench_sessions,
    "overload": bench_overload,
    "several": bench_several,
    "replicas": bench_replicas,
}
USUAL = [name for name in SECTIONS if name != "replicas"]  # that one needs Ray


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m scripts.bench server", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--seconds", type=float, default=60, help="length of the overload [60]")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    options = parser.parse_args(arguments)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown section {sorted(unknown)[0]!r}; there are {', '.join(SECTIONS)}")
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f} before this")
    results = []
    for name in options.sections or USUAL:
        for result in SECTIONS[name](options):
            results.append(result)
            verdict = "PASS" if result.is_met else "FAIL"
            print(f"| {result.what} | {result.measured} | {result.limit} | {verdict} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1))
    return 0 if all(one.is_met for one in results) else 1
