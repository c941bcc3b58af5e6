"""Measures replicas behind one front on a Ray of its own, in some minutes.

`python -m scripts.bench cluster` runs it all, naming measurements runs those: throughput,
added time.
"""

import argparse
import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import websockets.asyncio.client

from deft_server.replicas.ray_serve import import_ray
from scripts.bench.load import message, sessions
from scripts.local_server import ask_metric, local_server, port_of

MEGABYTE = 1024 * 1024
NUM_SESSIONS = 16


def replicas(ray: str, count: int) -> list[str]:
    """Return the flags of a server with so many replicas on the Ray of an address."""
    return ["--replicas", str(count), "--ray", ray, "--replica-cpus=0.1"]


def sleeping(sleep_ms: float) -> list[str]:
    return ["--policy", "sleeping", "--sleep-ms", str(sleep_ms), "--max-batch", "1"]


def throughput(ray: str, seconds: float) -> None:
    """Sixteen sessions that ask again as soon as they are answered."""
    rates = {}
    for count in (1, 2):
        with local_server(*replicas(ray, count), *sleeping(50)) as url:
            wait_for_replicas(url, count)
            bodies = [message(64, f"s{number}") for number in range(NUM_SESSIONS)]
            loads = asyncio.run(sessions(port_of(url), bodies, seconds))
        rates[count] = sum(len(load[200]) for load in loads) / seconds
    ratio = rates[2] / rates[1]
    print(f"throughput: {rates[1]:.1f} and {rates[2]:.1f} frames/s, {ratio:.2f}x (at least 1.9x)")


def added_time(ray: str, _: float) -> None:
    """The same frame of 200 kB to a policy on a thread and to one replica, in turns."""
    body = message(258, "s")
    with (
        local_server(*sleeping(0.5)) as here,
        local_server(*replicas(ray, 1), *sleeping(0.5)) as there,
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
        if ask_metric(url, "deft_replicas") == count:
            return
        time.sleep(0.1)
    raise SystemExit(f"{url} never had {count} replicas")


MEASUREMENTS: dict[str, Callable[[str, float], None]] = {
    "throughput": throughput,
    "added": added_time,
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


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m scripts.bench cluster", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MEASUREMENT", help=", ".join(MEASUREMENTS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of most loads [20]")
    given = parser.parse_args(arguments)
    names: Sequence[str] = given.names or list(MEASUREMENTS)
    if unknown := set(names) - set(MEASUREMENTS):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(MEASUREMENTS)}")
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f} before this", flush=True)
    with own_ray() as address:
        for name in names:
            try:
                MEASUREMENTS[name](address, given.seconds)
            except Exception:
                logging.exception("%s is not measured; the others can be", name)
            import_ray()[1].shutdown()  # or the next would begin with these replicas
    return 0
