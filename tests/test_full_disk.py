"""A full or vanishing disk, at any byte, leaves every earlier step readable; room lets work go on.

Five writers, one promise: the robot's recorder, the server's recording, results of an evaluation,
training runs, demonstrations. A limit on the size of files fails a write at an exact byte; where
this machine allows mounting, a file system of 1 MB is a disk that is really full.
"""

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from deft_client.recorder import Recorder
from deft_core.datasets.demonstrations import episode_path, find_demonstrations, load_demonstration
from deft_core.recordings import RecordedStep, find_episodes
from deft_core.types import ActionChunk, ActOptions, Observation
from deft_draft_training.errors import StorageError
from deft_draft_training.run_directory import RunDirectory
from deft_libero.errors import ResultsWriteError
from deft_libero.results.store import EPISODES_FILE, ResultsStore, load_run
from deft_server.recording.files import EpisodeFiles
from tests.core.datasets.test_demonstrations import HEADER, demonstration
from tests.libero.episodes import header, record
from tests.recorded_episodes import read_episode
from tiny_libero_recipe.demonstration_writer import save_demonstration

UNITS = 3  # what each writer is asked to write: steps, episodes, or lines of metrics


class Writer(Protocol):
    """Writes numbered units to a folder."""

    def write(self, number: int) -> bool:
        """Write one; was it written?"""

    def close(self) -> None:
        """End it as the product would."""


def observation(number: int) -> Observation:
    pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), np.uint8)
    return Observation(pixels, "lift the cup")


def chunk(number: int) -> ActionChunk:
    return ActionChunk(np.full((1, 7), float(number)))


class Numbering:
    """A policy that answers with the number it was told."""

    session_id = "arm"
    number = 0

    def act(self, observation: Observation, options: ActOptions | None = None) -> ActionChunk:
        return chunk(self.number)

    def reset(self, session_id: str | None = None) -> None:
        return None


class Robot:
    def __init__(self, folder: Path) -> None:
        self.policy = Numbering()
        self.recorder = Recorder(self.policy, folder)

    def write(self, number: int) -> bool:
        self.policy.number = number
        self.recorder.act(observation(number))  # never fails: the robot goes on
        self.recorder.flush()
        return self.recorder.problem is None

    def close(self) -> None:
        self.recorder.close()


class Server:
    key = ("lab", "arm")

    def __init__(self, folder: Path) -> None:
        # Its own look for room is left out: the disk is full in the middle of a write.
        self.files = EpisodeFiles(folder, min_free_bytes=0, num_free=lambda _: 10**9)

    def write(self, number: int) -> bool:
        step = RecordedStep(number, number, observation(number), ActOptions(), chunk(number))
        try:
            self.files.write(self.key, step, 1e9)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.files.close("the disk failed")


class Results:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store: ResultsStore | None = None

    def write(self, number: int) -> bool:
        try:
            self.store = self.store or ResultsStore(self.folder, header())
            self.store.append(record(0, number, num_steps=1))
        except ResultsWriteError:
            return False
        return True

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


class Training:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: RunDirectory | None = None

    def write(self, number: int) -> bool:
        try:
            self.run = self.run or RunDirectory(self.folder, {"rate": 0.1})
            self.run.log(number, {"loss": 0.25})
        except StorageError:
            return False
        return True

    def close(self) -> None:
        if self.run is not None:
            self.run.close()


class Demonstrations:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, number: int) -> bool:
        one = replace(demonstration(), header=replace(HEADER, episode=number))
        try:
            save_demonstration(episode_path(self.folder, 0, number), one)
        except OSError:
            return False
        return True

    def close(self) -> None:
        return None


def recorded(folder: Path) -> list[int]:
    episodes = [read_episode(path) for path in find_episodes(folder)]
    return [int(step.chunk.actions[0, 0]) for one in episodes for step in one.steps]


def evaluated(folder: Path) -> list[int]:
    there = (folder / EPISODES_FILE).exists()
    return [one.key.trial for one in load_run(folder).records] if there else []


def trained(folder: Path) -> list[int]:
    if not (folder / "config.json").exists():
        return []
    with RunDirectory(folder, {"rate": 0.1}, writes=False) as run:
        return [int(line["step"]) for line in run.metrics()]


def demonstrated(folder: Path) -> list[int]:
    return [load_demonstration(path).header.episode for path in find_demonstrations(folder)]


@dataclass(frozen=True)
class Case:
    build: Callable[[Path], Writer]
    read: Callable[[Path], list[int]]
    stride: int  # bytes between two limits, as making files takes its time


CASES = {
    "recorder": Case(Robot, recorded, 7),
    "server": Case(Server, recorded, 7),
    "results": Case(Results, evaluated, 17),
    "training": Case(Training, trained, 1),
    "demonstrations": Case(Demonstrations, demonstrated, 101),
}


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def limit_file_size() -> Iterator[Callable[[int], None]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_all(writer: Writer) -> list[int]:
    return [number for number in range(UNITS) if writer.write(number)]


def largest_file(folder: Path) -> int:
    return max(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_disk_that_is_full_at_any_byte_keeps_what_was_written_before(
    tmp_path: Path, case: Case, limit_file_size: Callable[[int], None]
) -> None:
    """The disk has room again when the files are closed: the worst case, as D9 was."""
    whole = case.build(tmp_path / "whole")
    assert write_all(whole) == list(range(UNITS))
    whole.close()
    size = largest_file(tmp_path / "whole")
    for limit in range(0, size, case.stride):
        folder = tmp_path / str(limit)
        writer = case.build(folder)
        limit_file_size(limit)
        written = write_all(writer)
        limit_file_size(resource.RLIM_INFINITY)
        writer.close()
        folder.mkdir(exist_ok=True)
        assert case.read(folder) == written, f"full at byte {limit} of {size}"
        shutil.rmtree(folder)


GROWING = [name for name in CASES if name != "demonstrations"]  # those are renamed into place


@pytest.mark.parametrize("name", GROWING)
def test_a_file_cut_at_any_byte_keeps_the_whole_units_before_the_cut(
    tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    writer = case.build(tmp_path)
    ends = []
    for number in range(UNITS):
        assert writer.write(number)
        (path,) = (one for one in tmp_path.rglob("*") if one.suffix in (".deftrec", ".jsonl"))
        ends.append(path.stat().st_size)
    content = path.read_bytes()
    for cut in range(ends[0], len(content)):
        path.write_bytes(content[:cut])
        assert case.read(tmp_path) == [n for n, end in enumerate(ends) if end <= cut]
    writer.close()


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 1 MB.

    It is not in pytest's folder: a run that is killed leaves it mounted, and the next run could
    not remove that folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="deft-small-disk-"))
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("this machine does not allow mounting a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()


def test_a_small_disk_that_fills_and_is_emptied_again_loses_nothing(
    small_disk: Path, case: Case
) -> None:
    ballast = small_disk / "ballast"
    folder = small_disk / "data"
    writer = case.build(folder)
    written = [0] if writer.write(0) else []
    free = shutil.disk_usage(small_disk).free
    ballast.write_bytes(bytes(free - 4096))
    for number in range(1, 1000):
        if not writer.write(number):
            break
        written.append(number)
    assert written == list(range(number))
    ballast.unlink()
    writer.close()
    assert case.read(folder) == written


def test_a_directory_that_vanishes_stops_the_recording_and_not_the_robot(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    robot = Robot(folder)
    assert robot.write(0)
    os.rename(folder, tmp_path / "elsewhere")
    folder.write_text("something else is mounted here now")
    robot.recorder.reset()
    assert not robot.write(1)
    assert recorded(tmp_path / "elsewhere") == [0]
