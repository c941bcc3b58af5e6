"""What becomes of frames while replicas die, are replaced by a new version, and are added."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import httpx
import numpy as np
import psutil

from deft_client import PolicyClient
from deft_client.types import ActOptions
from deft_client.wire.images import ImageEncoding
from deft_client.wire.messages import ActMessage
from deft_client.wire.msgpack_codec import decode_answer, encode_request
from deft_policies.benchmark.replay import generate_frames
from deft_policies.constant import SleepingPolicy
from deft_server.replicas.ray_serve import Deployment, RayCluster
from deft_server.reproduce.local_server import local_server
from scripts.bench_server.load import Connection, http_request, message
from scripts.bench_server.replicas import (
    RayPlace,
    metric,
    port_of,
    robots,
    sleeping,
    statuses,
    wait_for_replicas,
)

REPLICA_NAME = "ray::ServeReplica:deft:PolicyReplica"
NUM_SESSIONS = 16
AFTER_S = 5.0  # into the load
AGAIN_S = 0.2  # after a refusal
LONGEST_S = 30.0  # that an answer may take
CHUNK = 4  # actions in an answer that tells its version


@dataclass
class Talk:
    """What one session was answered."""

    actions: list[np.ndarray] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    slowest_s: float = 0.0


async def talk(port: int, bodies: Iterable[bytes]) -> Talk:
    """Send one frame after the other, each until it is answered."""
    told, connection = Talk(), Connection(port)
    for body in bodies:
        start_s, status = time.perf_counter(), 0
        while status != 200:
            exchange = connection.exchange(http_request(body))
            status, content = await asyncio.wait_for(exchange, LONGEST_S)
            told.statuses[status] += 1
            if status not in (200, 429, 503):
                raise SystemExit(f"an answer of status {status}: {content[:300]!r}")
            await asyncio.sleep(0 if status == 200 else AGAIN_S)
        told.actions.append(decode_answer(content).actions)
        told.slowest_s = max(told.slowest_s, time.perf_counter() - start_s)
    connection.close()
    return told


def talk_all(port: int, bodies: list[Iterable[bytes]]) -> list[Talk]:
    """Have every session talk at the same time."""

    async def all_of_them() -> list[Talk]:
        return await asyncio.gather(*(talk(port, one) for one in bodies))

    return asyncio.run(all_of_them())


def during(change: Callable[[], float], load: Callable[[], list[Talk]]) -> tuple[float, list[Talk]]:
    """Change something while a load runs; return what the change says, and the talks."""
    said: list[float] = []
    thread = threading.Thread(target=lambda: said.append(change()))
    thread.start()
    talks = load()
    thread.join()
    return said[0], talks


def told(talks: list[Talk]) -> str:
    """Say how the frames of all sessions were answered."""
    counts = sum((one.statuses for one in talks), Counter[int]())
    slowest_s = max(one.slowest_s for one in talks)
    return f"{dict(counts)}, the slowest answer after {slowest_s:.2f} s"


def kill(place: RayPlace) -> None:
    """Kill one of two replicas of the small policy under the load of sixteen sessions."""
    steps = round(2 * place.seconds)
    flags = [*place.flags(2), "--policy", "tiny-libero", "--threads", "1", "--max-batch", "1"]
    with local_server(*flags) as url:
        wait_for_replicas(url, 2)
        quiet = talk_all(port_of(url), walks(url, "quiet", steps))
        back_s, rough = during(
            partial(kill_one, url), lambda: talk_all(port_of(url), walks(url, "rough", steps))
        )
    same = sum(
        here.tobytes() == there.tobytes()
        for one, other in zip(quiet, rough, strict=True)
        for here, there in zip(one.actions, other.actions, strict=True)
    )
    print(f"kill -9 of a replica, lossless, {NUM_SESSIONS} sessions: {told(rough)}")
    print(f"  {same} of {NUM_SESSIONS * steps} answers to the bit as undisturbed (all of them)")
    print(f"  both replicas back after {back_s:.1f} s (at most 15)")


def walks(url: str, name: str, steps: int) -> list[Iterable[bytes]]:
    """Return what each session sends: frames of its own, the same for every name."""
    with PolicyClient(url) as client:
        info = client.info()
    key = info.default_statistics_key or info.statistics_keys[0]

    def walk(number: int) -> list[bytes]:
        options = ActOptions(session_id=f"{name} {number}", statistics_key=key)
        frames = generate_frames(steps, seed=number)
        return [encode_request(ActMessage(one.observation, options)) for one in frames]

    return [walk(number) for number in range(NUM_SESSIONS)]


def kill_one(url: str) -> float:
    """Kill a replica a while into the load; return the seconds until there are two again."""
    time.sleep(AFTER_S)
    found = [one for one in psutil.Process().children(recursive=True) if is_replica(one)]
    start_s = time.monotonic()
    found[0].kill()
    wait_for_replicas(url, 1)
    wait_for_replicas(url, 2)
    return time.monotonic() - start_s


def is_replica(process: psutil.Process) -> bool:
    try:
        return any(word.startswith(REPLICA_NAME) for word in process.cmdline()[:1])
    except psutil.Error:
        return False


def update(place: RayPlace) -> None:
    """Deploy another version under the load of sixteen sessions; answers tell their version."""
    deploy(place.ray, 1)
    with local_server("--ray", place.ray, "--max-batch", "1") as url:
        wait_for_replicas(url, 2)
        over = threading.Event()

        def change() -> float:
            time.sleep(AFTER_S)
            start_s = time.monotonic()
            deploy(place.ray, 2)
            took_s = time.monotonic() - start_s
            time.sleep(AFTER_S)
            over.set()
            return took_s

        def chat(number: int) -> Iterator[bytes]:
            while not over.is_set():
                yield message(64, f"s{number}")

        chats: list[Iterable[bytes]] = [chat(number) for number in range(NUM_SESSIONS)]
        took_s, talks = during(change, lambda: talk_all(port_of(url), chats))
    answers = [actions for one in talks for actions in one.actions]
    versions = Counter(float(one[0, 0]) for one in answers)
    mixed = sum(len(np.unique(one)) != 1 for one in answers)
    first = {one.actions[0][0, 0] for one in talks}
    last = {one.actions[-1][0, 0] for one in talks}
    print(f"rolling update of two replicas under load in {took_s:.1f} s: {told(talks)}")
    print(f"  answers by version {dict(versions)}, of two versions {mixed} (0)")
    print(f"  sessions began with version {first} and ended with {last}")


def deploy(ray: str, version: int) -> None:
    """Have two replicas whose actions are the number of their version; return when they run."""
    load = partial(SleepingPolicy, np.full((CHUNK, 7), float(version)), 0.05)
    RayCluster(ray, Deployment(load, str(version), 2, cpus=0.1)).connect()


def scale(place: RayPlace) -> None:
    """Twelve robots that need three replicas of 50 ms, where one runs and four may."""
    seconds = 2 * place.seconds
    with local_server(*place.flags(1), "--most-replicas", "4", *sleeping(50)) as url:
        wait_for_replicas(url, 1)
        seen: dict[float, float] = {}
        over = threading.Event()

        def watch() -> None:
            start_s = time.monotonic()
            while not over.wait(0.5):
                count = metric(httpx.get(f"{url}/metrics").text, "deft_replicas")
                seen.setdefault(count, time.monotonic() - start_s)

        watcher = threading.Thread(target=watch)
        watcher.start()
        load = robots(port_of(url), 12, 5.0, seconds, ImageEncoding.RAW)
        over.set()
        watcher.join()
    counts = ", ".join(f"{count:.0f} from {at_s:.0f} s on" for count, at_s in sorted(seen.items()))
    print(f"12 robots at 5 Hz, replicas of 50 ms, at most 4: {counts}")
    for half, is_late in (("first", False), ("last", True)):
        part = [one for one in load.replies if (one.sent_s > 0.75 * seconds) == is_late]
        part = [one for one in part if is_late or one.sent_s < 0.25 * seconds]
        print(f"  {half} quarter: {dict(statuses(part))}")
