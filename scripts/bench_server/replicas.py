"""Measures replicas behind one front: throughput, added time, and the forecast beside what is.

`python -m scripts.bench_server.cluster` runs it.
"""

import asyncio
import os
import re
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import websockets.asyncio.client

from deft_client.types import ActOptions
from deft_client.wire.images import ImageEncoding
from deft_client.wire.messages import ActMessage
from deft_client.wire.msgpack_codec import encode_request
from deft_server.planning.service_times import read_log
from deft_server.planning.simulate import Capacity, Fleet, Forecast, simulate
from deft_server.reproduce.local_server import local_server
from deft_server.serving.waiting_line import LineRules
from scripts.bench_server.load import (
    Connection,
    Load,
    Reply,
    frame,
    http_request,
    message,
    sessions,
)

FRAME_SIDE = 258  # 200 kB of pixels
CPU = "process_cpu_seconds_total"
FORECAST_S = 60.0


@dataclass(frozen=True)
class RayPlace:
    """Where Ray is, and how long each load lasts."""

    ray: str
    seconds: float

    def flags(self, num_replicas: int) -> list[str]:
        """Return the flags of a server with so many replicas."""
        return ["--replicas", str(num_replicas), "--ray", self.ray, "--replica-cpus", "0.1"]


def sleeping(sleep_ms: float) -> list[str]:
    return ["--policy", "sleeping", "--sleep-ms", str(sleep_ms), "--max-batch", "1"]


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def throughput(place: RayPlace) -> None:
    """Sixteen sessions that ask again as soon as they are answered."""
    rates = {}
    for count in (1, 2):
        with local_server(*place.flags(count), *sleeping(50)) as url:
            wait_for_replicas(url, count)
            bodies = [message(64, f"s{number}") for number in range(16)]
            loads = asyncio.run(sessions(port_of(url), bodies, place.seconds))
        rates[count] = sum(load.count(200) for load in loads) / place.seconds
    ratio = rates[2] / rates[1]
    print(f"throughput: {rates[1]:.1f} and {rates[2]:.1f} frames/s, {ratio:.2f}x (at least 1.9x)")


def added_time(place: RayPlace) -> None:
    """The same frame to a policy on a thread and to one replica, in turns."""
    body = message(FRAME_SIDE, "s")
    with (
        local_server(*sleeping(0.5)) as here,
        local_server(*place.flags(1), *sleeping(0.5)) as there,
    ):
        wait_for_replicas(there, 1)
        took_ms = asyncio.run(alternate([port_of(here), port_of(there)], body, 400))
    near, far = (np.percentile(one, [50, 90]) for one in took_ms)
    print(
        f"a frame of {len(body)} bytes over the WebSocket, p50 (p90): thread {near[0]:.2f} "
        f"({near[1]:.2f}) ms, replica {far[0]:.2f} ({far[1]:.2f}) ms; "
        f"added {far[0] - near[0]:.2f} ms (at most 3)"
    )


async def alternate(ports: list[int], body: bytes, rounds: int) -> list[list[float]]:
    took_ms: list[list[float]] = [[] for _ in ports]
    connect = websockets.asyncio.client.connect
    sockets = [await connect(f"ws://127.0.0.1:{p}/v1/stream", compression=None) for p in ports]
    for number in range(rounds):
        for socket, spent in zip(sockets, took_ms, strict=True):
            start_s = time.perf_counter()
            await socket.send(body)
            await socket.recv()
            if number >= rounds // 10:
                spent.append((time.perf_counter() - start_s) * 1000)
    for socket in sockets:
        await socket.close()
    return took_ms


def wait_for_replicas(url: str, count: int) -> None:
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s:
        if metric(httpx.get(f"{url}/metrics").text, "deft_replicas") == count:
            return
        time.sleep(0.1)
    raise SystemExit(f"{url} never had {count} replicas")


def metric(page: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", page, re.M)
    assert found is not None, name
    return float(found[1])


def robots(port: int, count: int, rate_hz: float, seconds: float, encoding: ImageEncoding) -> Load:
    """Robots that send at a fixed rate whatever they are answered; every frame is accounted for."""
    load = Load()

    async def one(number: int, start_s: float, random: np.random.Generator) -> None:
        options = ActOptions(session_id=f"robot {number}")
        request = http_request(encode_request(ActMessage(frame(224), options), encoding))
        idle: list[Connection] = []
        tasks = []

        async def ask() -> None:
            connection = idle.pop() if idle else Connection(port)
            sent_s = time.perf_counter()
            status = await connection.ask(request)
            load.replies.append(Reply(sent_s - start_s, time.perf_counter() - sent_s, status))
            idle.append(connection)

        phase_s = random.random() / rate_hz
        for beat in range(int(seconds * rate_hz)):
            due_s = start_s + phase_s + beat / rate_hz + 0.1 / rate_hz * (random.random() - 0.5)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(ask()))
        await asyncio.gather(*tasks)
        for connection in idle:
            connection.close()

    async def all_of_them() -> None:
        start_s, random = time.perf_counter(), np.random.default_rng(0)
        await asyncio.gather(*(one(number, start_s, random) for number in range(count)))

    asyncio.run(all_of_them())
    return load


def statuses(replies: Sequence[Reply]) -> Counter[int]:
    return Counter(one.status for one in replies)


def forecast(place: RayPlace) -> None:
    """Twenty robots at 5 Hz over four replicas, measured and foretold; then more robots."""
    log: deque[str] = deque()
    seconds = FORECAST_S
    flags = [*place.flags(4), *sleeping(50), "--log-batches"]
    with local_server(*flags, log=log) as url:
        wait_for_replicas(url, 4)
        spent_s = metric(httpx.get(f"{url}/metrics").text, CPU)
        load = robots(port_of(url), 20, 5.0, seconds, ImageEncoding.JPEG)
        front_s = metric(httpx.get(f"{url}/metrics").text, CPU) - spent_s
    sent = int(seconds * 5) * 20
    print(f"20 robots at 5 Hz, 4 replicas: {len(load.replies)} replies to {sent} frames:")
    print(f"  {dict(statuses(load.replies))}, load average {os.getloadavg()[0]:.1f}")
    capacity = fitted(log, front_s / len(load.replies))
    told = simulate(Fleet(20, 5.0, seconds=seconds), capacity)
    seen_ms = np.percentile(load.took_ms(200), [50, 99])
    share = load.count(200) / len(load.replies)
    print(f"  measured p50 {seen_ms[0]:.1f} ms, p99 {seen_ms[1]:.1f} ms, {share:.1%} answered")
    print(f"  foretold {line(told)}")
    print(
        f"  measured / foretold: p50 {seen_ms[0] / (told.at(0.5) * 1000):.2f}, "
        f"p99 {seen_ms[1] / (told.at(0.99) * 1000):.2f} (at most 1.25)"
    )
    for count in (100, 1000):
        told = simulate(Fleet(count, 5.0), capacity)
        print(f"  {count} robots, foretold: {line(told)}")


def fitted(log: deque[str], front_s: float) -> Capacity:
    """Return what the forecast needs to know, as `deft plan --log --front-ms` would read it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "server.log")
        file.write_text("".join(log))
        service = read_log(file)
    p50, p99 = (service.at(1, share) * 1000 for share in (0.5, 0.99))
    print(
        f"  a batch took {p50:.1f} ms (p99 {p99:.1f}), the front {front_s * 1000:.2f} ms of "
        f"processor time a frame"
    )
    return Capacity(service, LineRules(max_batch=1, num_replicas=4), front_s)


def line(told: Forecast) -> str:
    return (
        f"p50 {told.at(0.5) * 1000:.1f} ms, p99 {told.at(0.99) * 1000:.1f} ms, "
        f"{told.answered_share:.1%} answered, {told.num_superseded} superseded, "
        f"{told.num_refused} refused of {told.num_sent}"
    )
