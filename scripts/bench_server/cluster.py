"""Measures replicas behind one front on a Ray of its own, in some minutes.

`python -m scripts.bench_server.cluster` runs it all, naming measurements runs those: throughput,
added time, and the forecast of `scripts.plan` beside what is.
"""

import argparse
import asyncio
import logging
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import websockets.asyncio.client

from deft_client.types import ActOptions
from deft_client.wire.images import ImageEncoding
from deft_client.wire.messages import ActMessage
from deft_client.wire.msgpack_codec import encode_request
from deft_server.replicas.ray_serve import import_ray
from deft_server.serving.queue import QueueRules
from scripts.bench_server.load import (
    frame,
    http_request,
    message,
    open_loop,
    sessions,
)
from scripts.local_server import ask_metric, local_server, port_of
from scripts.plan.service_times import read_log
from scripts.plan.simulate import Capacity, Fleet, Forecast, simulate

MEGABYTE = 1024 * 1024
CPU = "process_cpu_seconds_total"
ROBOTS, HZ, FORECAST_S = 20, 5.0, 60.0
NUM_SESSIONS = 16


@dataclass(frozen=True)
class RayPlace:
    """Where Ray is, and how long each load lasts."""

    ray: str
    seconds: float

    def flags(self, num_replicas: int, *policy: str) -> list[str]:
        """Return the flags of a server with so many replicas."""
        return ["--replicas", str(num_replicas), "--ray", self.ray, "--replica-cpus=0.1", *policy]


def sleeping(sleep_ms: float) -> list[str]:
    return ["--policy", "sleeping", "--sleep-ms", str(sleep_ms), "--max-batch", "1"]


def throughput(place: RayPlace) -> None:
    """Sixteen sessions that ask again as soon as they are answered."""
    rates = {}
    for count in (1, 2):
        with local_server(*place.flags(count, *sleeping(50))) as url:
            wait_for_replicas(url, count)
            bodies = [message(64, f"s{number}") for number in range(NUM_SESSIONS)]
            loads = asyncio.run(sessions(port_of(url), bodies, place.seconds))
        rates[count] = sum(load.count(200) for load in loads) / place.seconds
    ratio = rates[2] / rates[1]
    print(f"throughput: {rates[1]:.1f} and {rates[2]:.1f} frames/s, {ratio:.2f}x (at least 1.9x)")


def added_time(place: RayPlace) -> None:
    """The same frame of 200 kB to a policy on a thread and to one replica, in turns."""
    body = message(258, "s")
    with (
        local_server(*sleeping(0.5)) as here,
        local_server(*place.flags(1, *sleeping(0.5))) as there,
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


def forecast(place: RayPlace) -> None:
    """Twenty robots at 5 Hz over four replicas, measured and foretold; then more robots."""
    log: deque[str] = deque()
    requests = [
        http_request(
            encode_request(
                ActMessage(frame(224), ActOptions(session_id=f"robot {number}")), ImageEncoding.JPEG
            )
        )
        for number in range(ROBOTS)
    ]
    with local_server(*place.flags(4, *sleeping(50)), "--log-batches", log=log) as url:
        wait_for_replicas(url, 4)
        spent_s = ask_metric(url, CPU)
        load = asyncio.run(open_loop(port_of(url), requests, ROBOTS * HZ, FORECAST_S))
        front_s = (ask_metric(url, CPU) - spent_s) / len(load.replies)
    statuses = Counter(one.status for one in load.replies)
    print(f"{ROBOTS} robots at {HZ:g} Hz, 4 replicas: {len(load.replies)} replies by status:")
    print(f"  {dict(statuses)}, load average {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "server.log")
        file.write_text("".join(log))
        service = read_log(file)
    batch_ms = [service.at(1, share) * 1000 for share in (0.5, 0.99)]
    print(f"  a batch took {batch_ms[0]:.1f} ms (p99 {batch_ms[1]:.1f}), the front", end=" ")
    print(f"{front_s * 1000:.2f} ms of processor time a frame")
    capacity = Capacity(service, QueueRules(max_batch=1, num_replicas=4), front_s)
    told = simulate(Fleet(ROBOTS, HZ, seconds=FORECAST_S), capacity)
    seen_ms = np.percentile(load.took_ms(200), [50, 99])
    share = load.count(200) / len(load.replies)
    print(f"  measured p50 {seen_ms[0]:.1f} ms, p99 {seen_ms[1]:.1f} ms, {share:.1%} answered")
    print(f"  foretold {line(told)}")
    print(
        f"  measured / foretold: p50 {seen_ms[0] / (told.at(0.5) * 1000):.2f}, "
        f"p99 {seen_ms[1] / (told.at(0.99) * 1000):.2f} (at most 1.25)"
    )
    for count in (100, 1000):
        print(f"  {count} robots, foretold: {line(simulate(Fleet(count, HZ), capacity))}")


def line(told: Forecast) -> str:
    return (
        f"p50 {told.at(0.5) * 1000:.1f} ms, p99 {told.at(0.99) * 1000:.1f} ms, "
        f"{told.answered_share:.1%} answered, {told.num_superseded} superseded, "
        f"{told.num_refused} refused of {told.num_sent}"
    )


def wait_for_replicas(url: str, count: int) -> None:
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s:
        if ask_metric(url, "deft_replicas") == count:
            return
        time.sleep(0.1)
    raise SystemExit(f"{url} never had {count} replicas")


MEASUREMENTS: dict[str, Callable[[RayPlace], None]] = {
    "throughput": throughput,
    "added": added_time,
    "forecast": forecast,
}


@contextmanager
def own_ray() -> Iterator[str]:
    """Start Ray with room for eight small replicas, yield its address, and end it."""
    ray, _ = import_ray()
    context = ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=200 * MEGABYTE,
        log_to_driver=False,
        configure_logging=False,
        logging_level=logging.WARNING,
    )
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser("python -m scripts.bench_server.cluster", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MEASUREMENT", help=", ".join(MEASUREMENTS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of most loads [20]")
    given = parser.parse_args()
    names: Sequence[str] = given.names or list(MEASUREMENTS)
    if unknown := set(names) - set(MEASUREMENTS):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(MEASUREMENTS)}")
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f} before this", flush=True)
    with own_ray() as address:
        for name in names:
            try:
                MEASUREMENTS[name](RayPlace(address, given.seconds))
            except Exception:
                logging.exception("%s is not measured; the others can be", name)
            import_ray()[1].shutdown()  # or the next would begin with these replicas


if __name__ == "__main__":
    main()
