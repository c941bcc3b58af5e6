"""Measures replicas behind one front: throughput, added time, a kill under load, and the forecast.

Start Ray first, because starting it takes longer than some measurements:
    ray start --head --num-cpus 4 --include-dashboard=false
    python -m scripts.bench_server.replicas --ray 127.0.0.1:6379
"""

import argparse
import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import numpy as np
import psutil
import websockets.asyncio.client

from deft_client.types import ActOptions
from deft_client.wire.images import ImageEncoding
from deft_client.wire.messages import ActMessage
from deft_client.wire.msgpack_codec import encode_request
from deft_server.planning.service_times import parse
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
REPLICA_NAME = "ray::ServeReplica:deft:PolicyReplica"
KILL_AFTER_S = 5.0
CPU = "process_cpu_seconds_total"


@dataclass(frozen=True)
class RayPlace:
    """Where Ray is, and how long each load lasts."""

    ray: str
    seconds: float

    def flags(self, num_replicas: int, sleep_ms: float) -> list[str]:
        """Return the flags of a server with replicas that sleep, one frame at a time."""
        own = ["--replicas", str(num_replicas), "--ray", self.ray, "--replica-cpus", "0.1"]
        return [*own, *sleeping(sleep_ms)]


def sleeping(sleep_ms: float) -> list[str]:
    return ["--policy", "sleeping", "--sleep-ms", str(sleep_ms), "--max-batch", "1"]


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def throughput(place: RayPlace) -> None:
    """Sixteen sessions that ask again as soon as they are answered."""
    rates = {}
    for count in (1, 2):
        with local_server(*place.flags(count, 50)) as url:
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
        local_server(*place.flags(1, 0.5)) as there,
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


def kill(place: RayPlace) -> None:
    """Kill one of two replicas under the load of sixteen sessions."""
    with local_server(*place.flags(2, 50)) as url:
        wait_for_replicas(url, 2)
        back: list[float] = []
        killer = threading.Thread(target=lambda: back.append(kill_one(url)))
        killer.start()
        load = robots(port_of(url), 16, 2.0, KILL_AFTER_S + 25, ImageEncoding.RAW)
        killer.join()
    print(
        f"kill -9 of a replica: {dict(statuses(load))} of {len(load.replies)} frames, both "
        f"replicas back after {back[0]:.1f} s (at most 15)"
    )


def kill_one(url: str) -> float:
    time.sleep(KILL_AFTER_S)
    before = replicas()
    before[0].kill()
    start_s = time.monotonic()
    while len([one for one in replicas() if one.pid != before[0].pid]) < 2:
        time.sleep(0.1)
    wait_for_replicas(url, 2)
    return time.monotonic() - start_s


def replicas() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or [""]
        if line[0].startswith(REPLICA_NAME):
            found.append(process)
    return found


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


def statuses(load: Load) -> Counter[int]:
    return Counter(one.status for one in load.replies)


def forecast(place: RayPlace) -> None:
    """Twenty robots at 5 Hz over four replicas, measured and foretold; then more robots."""
    with local_server(*place.flags(4, 50), "--log-batches") as url:
        wait_for_replicas(url, 4)
        spent_s = metric(httpx.get(f"{url}/metrics").text, CPU)
        load = robots(port_of(url), 20, 5.0, place.seconds, ImageEncoding.JPEG)
        page = httpx.get(f"{url}/metrics").text
    mean_ms = (
        1000 * metric(page, "deft_batch_seconds_sum") / metric(page, "deft_batch_seconds_count")
    )
    front_ms = 1000 * (metric(page, CPU) - spent_s) / len(load.replies)
    took_ms = load.took_ms(200)
    sent = int(place.seconds * 5) * 20
    print(
        f"20 robots at 5 Hz, 4 replicas: {len(load.replies)} of {sent} frames had one reply each:"
    )
    print(
        f"  {dict(statuses(load))}; a batch took {mean_ms:.1f} ms on average, "
        f"the front {front_ms:.2f} ms of processor time a frame"
    )
    rules = LineRules(max_batch=1, num_replicas=4)
    capacity = Capacity(parse(f"{mean_ms}"), rules, front_ms / 1000)
    told = simulate(Fleet(20, 5.0, seconds=place.seconds), capacity)
    seen = np.percentile(took_ms, [50, 99])
    print(f"  measured p50 {seen[0]:.1f} ms, p99 {seen[1]:.1f} ms; foretold {line(told)}")
    print(
        f"  p99: measured {seen[1] / (told.at(0.99) * 1000):.2f} times the forecast (at most 1.25)"
    )
    for count in (100, 1000):
        told = simulate(Fleet(count, 5.0), capacity)
        print(f"  {count} robots, foretold: {line(told)}")


def line(told: Forecast) -> str:
    return (
        f"p50 {told.at(0.5) * 1000:.1f} ms, p99 {told.at(0.99) * 1000:.1f} ms, "
        f"{told.answered_share:.1%} answered, {told.num_superseded} superseded, "
        f"{told.num_refused} refused of {told.num_sent}"
    )


MEASUREMENTS: dict[str, Callable[[RayPlace], None]] = {
    "throughput": throughput,
    "added": added_time,
    "kill": kill,
    "forecast": forecast,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ray", required=True, help="address of a Ray cluster")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--only", choices=list(MEASUREMENTS), nargs="*", default=[*MEASUREMENTS])
    given = parser.parse_args()
    for name in given.only:
        MEASUREMENTS[name](RayPlace(given.ray, given.seconds))


if __name__ == "__main__":
    main()
