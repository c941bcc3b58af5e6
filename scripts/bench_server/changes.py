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
from deft_client.wire.json_codec import decode_problem
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
PAUSE_S = 0.2  # of sessions that there is room for, even while one replica is away
LONGEST_S = 30.0  # that an answer may take
SCALED_ROBOTS = 10
SCALE_S = 60.0
SHRINK_S = 240.0  # at most, until one replica is left
CHUNK = 4  # actions in an answer that tells its version


@dataclass
class Talk:
    """What one session was answered."""

    actions: list[np.ndarray] = field(default_factory=list)
    refused_new: Counter[int] = field(default_factory=Counter)  # before the first answer
    refused: Counter[int] = field(default_factory=Counter)  # after it
    slowest_s: float = 0.0


async def talk(port: int, bodies: Iterable[bytes], pause_s: float) -> Talk:
    """Send each frame until it is answered, waiting after a refusal as long as that says."""
    told, connection = Talk(), Connection(port)
    for body in bodies:
        start_s = time.perf_counter()
        while True:
            exchange = connection.exchange(http_request(body))
            status, content = await asyncio.wait_for(exchange, LONGEST_S)
            if status == 200:
                break
            problem = decode_problem(status, content)
            if status not in (429, 503):
                raise SystemExit(f"an answer of status {status}: {problem}")
            (told.refused if told.actions else told.refused_new)[status] += 1
            await asyncio.sleep(problem.retry_after_s or 0.0)
        told.actions.append(decode_answer(content).actions)
        told.slowest_s = max(told.slowest_s, time.perf_counter() - start_s)
        await asyncio.sleep(pause_s)
    connection.close()
    return told


def talk_all(port: int, bodies: list[Iterable[bytes]], pause_s: float = 0.0) -> list[Talk]:
    """Have every session talk at the same time, pausing after each answer."""

    async def all_of_them() -> list[Talk]:
        return await asyncio.gather(*(talk(port, one, pause_s) for one in bodies))

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
    new = sum((one.refused_new for one in talks), Counter[int]())
    later = sum((one.refused for one in talks), Counter[int]())
    return (
        f"{sum(len(one.actions) for one in talks)} answers, the slowest after "
        f"{max(one.slowest_s for one in talks):.2f} s; refused by status: {dict(new)} of sessions "
        f"that had no answer yet, {dict(later)} of the others"
    )


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


@dataclass(frozen=True)
class Update:
    """What is deployed, and under which load."""

    version: int
    num_replicas: int
    num_sessions: int
    pause_s: float = 0.0
    surge: bool = False

    def deploy(self, ray: str) -> None:
        """Have replicas whose actions are the number of their version; return when they run."""
        load = partial(SleepingPolicy, np.full((CHUNK, 7), float(self.version)), 0.05)
        deployment = Deployment(
            load, str(self.version), self.num_replicas, cpus=0.1, surge=self.surge
        )
        RayCluster(ray, deployment).connect()


def update(place: RayPlace) -> None:
    """Deploy other versions: under sessions there is room for, and under more than that."""
    Update(1, 2, 0).deploy(place.ray)
    with local_server("--ray", place.ray, "--max-batch", "1") as url:
        wait_for_replicas(url, 2)
        update_under(place, url, Update(2, 2, 4, PAUSE_S))
        update_under(place, url, Update(3, 2, NUM_SESSIONS))
        Update(4, 1, 0).deploy(place.ray)
        wait_for_replicas(url, 1)
        update_under(place, url, Update(5, 1, 2, PAUSE_S, surge=True))


def update_under(place: RayPlace, url: str, new: Update) -> None:
    """Replace the replicas; the answers tell their version."""
    over = threading.Event()

    def change() -> float:
        time.sleep(AFTER_S)
        start_s = time.monotonic()
        new.deploy(place.ray)
        took_s = time.monotonic() - start_s
        time.sleep(AFTER_S)
        over.set()
        return took_s

    def chat(number: int) -> Iterator[bytes]:
        while not over.is_set():
            yield message(64, f"{new.version} {number}")

    chats: list[Iterable[bytes]] = [chat(number) for number in range(new.num_sessions)]
    took_s, talks = during(change, lambda: talk_all(port_of(url), chats, new.pause_s))
    answers = [actions for one in talks for actions in one.actions]
    versions = Counter(float(one[0, 0]) for one in answers)
    mixed = sum(len(np.unique(one)) != 1 for one in answers)
    last = {float(one.actions[-1][0, 0]) for one in talks if one.actions}
    print(
        f"rolling update of {new.num_replicas} replicas in {took_s:.1f} s"
        f"{', each new one first' if new.surge else ''}, under {new.num_sessions} sessions that "
        f"pause {new.pause_s:g} s: {told(talks)}"
    )
    print(f"  answers by version {dict(versions)}, of both {mixed} (0), last {last}", flush=True)


def scale(place: RayPlace) -> None:
    """Robots that need more than one replica of 50 ms, where one runs and four may; then none."""
    with local_server(*place.flags(1), "--most-replicas", "4", *sleeping(50)) as url:
        wait_for_replicas(url, 1)
        start_s, seen = time.monotonic(), [(0.0, 1)]
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.5):
                count = int(metric(httpx.get(f"{url}/metrics").text, "deft_replicas"))
                if count != seen[-1][1]:
                    seen.append((time.monotonic() - start_s, count))

        watcher = threading.Thread(target=watch)
        watcher.start()
        load = robots(port_of(url), SCALED_ROBOTS, 5.0, SCALE_S, ImageEncoding.JPEG)
        until_s = time.monotonic() + SHRINK_S
        while seen[-1][1] > 1 and time.monotonic() < until_s:
            time.sleep(0.5)
        over.set()
        watcher.join()
    counts = ", ".join(f"{count} after {at_s:.0f} s" for at_s, count in seen)
    print(f"{SCALED_ROBOTS} robots at 5 Hz for {SCALE_S:g} s, then none; replicas: {counts}")
    for name, first, last in (("first", 0.0, 0.25), ("last", 0.75, 1.0)):
        part = [one for one in load.replies if first <= one.sent_s / SCALE_S < last]
        print(f"  {name} quarter: {dict(statuses(part))}")
