"""Steady robots beside callers that hang up: every answer is the one that the robot gets alone.

The callers close their sockets at any moment between asking and being answered, over every protocol
in which a robot may ask.
"""

import itertools
import os
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from deft_client import ClientSettings, DeftError, Observation, PolicyClient, StreamClient, Timeouts
from deft_core.peers.openvla import openvla_fields
from deft_libero.policies.peers import OpenPiPolicy, OpenVlaPolicy
from tests.draws import draws
from tests.repository import ROOT
from tests.server.nginx import NEEDS_NGINX, nginx_before

pytestmark = pytest.mark.promise

NUM_ANSWERS = draws(120)
CHECKPOINT = ROOT / "tests/golden/tiny_openvla"
FLAGS = f"--threads 1 --checkpoint {CHECKPOINT} --statistics-key libero_spatial".split()
INSTRUCTIONS = ("pick up the milk and place it in the basket", "put the chocolate pudding away")
Act = Callable[[Observation], NDArray[np.float64]]


@contextmanager
def served(log: Path, *flags: str) -> Iterator[str]:
    """`deft serve` with a tiny checkpoint, whose answers many hang-ups meet; yields its URL."""
    code = "from deft_server.__main__ import main; raise SystemExit(main())"
    paths = os.pathsep.join(str(ROOT / name) for name in ("client", "policies", "server"))
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "--port", "0", *FLAGS, *flags],
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": paths},
        )
    try:
        pause = threading.Event()
        for _ in range(1200):
            found = re.findall(r"http://127\.0\.0\.1:\d+", log.read_text())
            if found and "ready" in log.read_text():
                break
            assert process.poll() is None, log.read_text()
            pause.wait(0.1)
        yield found[0]
    finally:
        process.terminate()
        process.wait(60)


def observation(number: int) -> Observation:
    rng = np.random.default_rng(number)
    image = rng.integers(0, 256, (256, 256, 3), dtype=np.uint8)
    return Observation(image, INSTRUCTIONS[number % 2])


@contextmanager
def steady_robots(url: str) -> Iterator[list[Act]]:
    """Two robots per protocol, each with a frame of its own."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(closing(one))
            for _ in range(2)
            for one in (
                PolicyClient(url),
                StreamClient(url),
                OpenVlaPolicy(url, openvla_fields),
                OpenPiPolicy(url),
            )
        ]
        yield [lambda seen, one=one: one.act(seen).actions for one in clients]


def hang_up(url: str, number: int, is_over: threading.Event) -> None:
    """Ask again and again, and close the connection before or after the answer."""
    rng = random.Random(number)
    for kind in itertools.cycle((PolicyClient, StreamClient)):
        if is_over.is_set():
            return
        patience = Timeouts(connect_s=5.0, answer_s=rng.uniform(0.005, 0.15))
        with suppress(DeftError), kind(url, ClientSettings(timeouts=patience)) as client:
            client.act(observation(100 + rng.randrange(10)))


def outcomes(url: str) -> Counter[str]:
    """What steady robots got beside callers that hang up: right, wrong, or an error's text."""
    seen: Counter[str] = Counter()
    with steady_robots(url) as robots:
        alone = [act(observation(number)) for number, act in enumerate(robots)]
        is_over, locks = threading.Event(), threading.Lock()

        def steady(number: int) -> None:
            frame = observation(number)
            while not is_over.is_set():
                try:
                    is_right = np.array_equal(robots[number](frame), alone[number])
                    kind = "right" if is_right else "wrong"
                except DeftError as error:
                    kind = f"{type(error).__name__}: {error}"
                with locks:
                    seen[kind] += 1
                    if seen.total() >= NUM_ANSWERS:
                        is_over.set()

        threads = [threading.Thread(target=steady, args=(one,)) for one in range(len(robots))]
        threads += [
            threading.Thread(target=hang_up, args=(url, number, is_over)) for number in range(6)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    return seen


@pytest.mark.timeout(900)  # hundreds of answers, on a machine that may do other work
def test_no_robot_gets_a_wrong_action_because_another_hung_up(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with served(log) as url:
        seen = outcomes(url)
    assert seen == {"right": seen["right"]}, seen
    assert "the policy raised" not in log.read_text()


@NEEDS_NGINX
@pytest.mark.timeout(900)
def test_nor_where_all_share_the_connections_of_a_proxy(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with (
        served(log, "--trusted-proxies", "127.0.0.1") as url,
        nginx_before(int(url.rsplit(":", 1)[1]), tmp_path) as proxy,
    ):
        seen = outcomes(proxy.url)
    assert seen == {"right": seen["right"]}, seen
    assert "the policy raised" not in log.read_text()
