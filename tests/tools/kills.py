"""Kills an evaluation, its workers and its server at random, and checks that no episode suffers.

Whatever is killed is started again, as an operator would. At the end every asked episode must have
exactly one result, every line must be whole, and the actions must equal those of a quiet run.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from deft_client import PolicyClient
from deft_core.errors import DeftError
from deft_libero.results.records import Outcome
from deft_libero.results.store import RunResults, load_run

WORLD = "point_world"
WORKER = re.compile("spawn_main|^ray::RemotePlayer")
SITTINGS = 5  # that Errored episodes may take after the last kill
PATIENCE_S = 60.0


@dataclass
class Scene:
    """What runs: a server at a fixed port, and an evaluation that writes to a folder."""

    server_command: Callable[[int], Sequence[str]]
    folder: Path
    episodes: int
    delay_ms: float
    flags: Sequence[str] = ()  # further ones of the evaluation
    port: int = field(default_factory=lambda: _free_port())
    server: subprocess.Popen[bytes] | None = None
    evaluation: subprocess.Popen[bytes] | None = None

    def start_server(self) -> None:
        """Start the server and wait until it answers."""
        log = self.folder / "server.log"
        with log.open("ab") as file:
            command = list(self.server_command(self.port))
            self.server = subprocess.Popen(command, stdout=file, stderr=file)
        _wait(self._server_answers, f"the server does not answer, see {log}")

    def _server_answers(self) -> bool:
        try:
            with PolicyClient(f"http://127.0.0.1:{self.port}") as client:
                client.ping()
        except DeftError:
            return False
        return True

    def start_evaluation(self) -> None:
        """Start the same evaluation, or go on with it."""
        command = [
            sys.executable, "-m", "deft_client", "eval", "point_world", "--environment", WORLD,
            "--url", f"http://127.0.0.1:{self.port}", "--episodes", str(self.episodes),
            "--workers", "2", "--out", str(self.folder), "--network-delay-ms", str(self.delay_ms),
            "--patience", str(PATIENCE_S), "--step-limit", "40", *self.flags,
        ]  # fmt: skip
        with (self.folder / "evaluation.log").open("ab") as file:
            self.evaluation = subprocess.Popen(command, stdout=file, stderr=file)

    def workers(self) -> list[int]:
        """Process ids of the evaluation's workers."""
        assert self.evaluation is not None
        return [pid for pid in _descendants(self.evaluation.pid) if WORKER.search(_command(pid))]

    def kill(self, target: str) -> bool:
        """Kill -9 what is named; False if there is nothing of the kind right now."""
        assert self.evaluation is not None
        assert self.server is not None
        if self.has_ended():
            return False
        if target == "worker":
            workers = self.workers()
            if workers:
                _kill(random.choice(workers))
            return bool(workers)
        process = self.evaluation if target == "evaluation" else self.server
        process.kill()
        process.wait()
        return True

    def go_on(self) -> None:
        """If the evaluation has ended incomplete, start it again, as its last line asks for.

        It also ends when its server was killed just while it was starting.
        """
        if self.has_ended() and not self.has_finished():
            self.start_evaluation()
        time.sleep(0.05)

    def has_ended(self) -> bool:
        """Whether the evaluation is not running, for whatever reason."""
        assert self.evaluation is not None
        return self.evaluation.poll() is not None

    def has_finished(self) -> bool:
        """Whether the evaluation has ended with every episode Succeeded or Failed."""
        assert self.evaluation is not None
        return self.evaluation.poll() == 0

    def stop(self) -> None:
        """End everything."""
        for process in (self.evaluation, self.server):
            if process is not None:
                process.kill()
                process.wait()

    def result(self) -> RunResults:
        """What is on disk now."""
        (header,) = self.folder.glob("*/run.json")
        return load_run(header.parent)


def torment(scene: Scene, targets: Sequence[str], pause_s: tuple[float, float]) -> Counter[str]:
    """Kill one target after the other, starting each again; then let the evaluation finish."""
    killed: Counter[str] = Counter()
    scene.start_server()
    scene.start_evaluation()
    for target in targets:
        time.sleep(random.uniform(*pause_s))
        while not scene.kill(target):
            if scene.has_finished():
                return killed
            scene.go_on()
        killed[target] += 1
        if target == "server":
            scene.start_server()
        scene.go_on()
    finish(scene)
    return killed


def finish(scene: Scene) -> None:
    """Let the evaluation come to its end."""
    for _ in range(SITTINGS):
        _wait(scene.has_ended, "the evaluation does not end", limit_s=600.0)
        if scene.has_finished():
            return
        scene.start_evaluation()
    raise TimeoutError(f"the evaluation is incomplete after {SITTINGS} more sittings")


def find_faults(run: RunResults, undisturbed: RunResults) -> list[str]:
    """What a kill has broken; loading the run has already refused torn and doubled lines."""
    faults = ["a torn line is left"] if run.has_torn_line else []
    there, wanted = ({one.key: one for one in each.records} for each in (run, undisturbed))
    faults += [f"{key} is missing" for key in wanted if key not in there]
    faults += [f"{key} was never asked for" for key in there if key not in wanted]
    for key, record in there.items():
        if record.outcome is Outcome.ERRORED:
            faults.append(f"{key} Errored: {record.error}")
        elif key in wanted and record.actions.tobytes() != wanted[key].actions.tobytes():
            faults.append(f"{key} has other actions than without kills")
    return faults


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(holds: Callable[[], bool], problem: str, limit_s: float = 60.0) -> None:
    gives_up_at = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > gives_up_at:
            raise TimeoutError(problem)
        time.sleep(0.02)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _descendants(pid: int) -> list[int]:
    found = [int(child) for file in _files(f"{pid}/task/*/children") for child in file.split()]
    return found + [one for child in found for one in _descendants(child)]


def _command(pid: int) -> str:
    return "".join(_files(f"{pid}/cmdline"))


def _files(pattern: str) -> Iterator[str]:
    """What is in the files of processes that are still there."""
    for path in Path("/proc").glob(pattern):
        with suppress(OSError):
            yield path.read_text()
