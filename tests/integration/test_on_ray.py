"""Replicas on a Ray of their own: what they answer when one is killed, and that it comes back."""

import time
from collections.abc import Callable
from contextlib import suppress

import httpx
import psutil
import pytest

from deft_client import PolicyClient
from deft_core.types import ActOptions
from deft_policies.benchmark.replay import generate_frames
from scripts.local_server import local_server

FLAGS = (
    *("--policy", "tiny-libero", "--threads", "1", "--no-guard"),
    *("--replicas", "2", "--replica-cpus", "0.1"),
)
STEPS = 24
WITHIN_S = 120.0


def _walk(url: str, name: str, at_half: Callable[[], None] = lambda: None) -> list[bytes]:
    """The actions of two sessions that take turns; something may happen half-way."""
    answers = []
    with PolicyClient(url) as client:
        key = client.info().default_statistics_key or client.info().statistics_keys[0]
        for step, one in enumerate(generate_frames(STEPS)):
            if step == STEPS // 2:
                at_half()
            options = ActOptions(session_id=f"{name} {step % 2}", statistics_key=key)
            answers.append(client.act(one.observation, options).actions.tobytes())
    return answers


def _replicas() -> list[psutil.Process]:
    """Those that run as children of this process's server."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "".join(process.cmdline()[:1]).startswith("ray::ServeReplica:deft"):
                found.append(process)
    return found


def _wait_until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.2)


@pytest.mark.timeout(600)  # Ray starts eight processes, and on a busy machine slowly
def test_a_killed_replica_changes_no_answer_and_comes_back() -> None:
    pytest.importorskip("ray", reason="needs Ray: make install-ray")
    with local_server(*FLAGS) as url:
        _wait_until(lambda: "\ndeft_replicas 2.0\n" in httpx.get(f"{url}/metrics").text)
        killed, kept = _replicas()
        assert kept.nice() == psutil.Process().nice()
        undisturbed = _walk(url, "quiet")
        assert _walk(url, "rough", killed.kill) == undisturbed
        _wait_until(lambda: len(_replicas()) == 2 and killed not in _replicas())
        assert kept in _replicas()
