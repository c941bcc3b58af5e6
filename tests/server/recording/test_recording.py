"""Recording beside serving: complete, bounded, and never in the way."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from deft_core.datasets.formats import find_parts
from deft_core.recordings import UNRECORDED, Ending, RecordedStep, find_episodes, read_header
from deft_core.types import ActionChunk, ActOptions, Observation
from deft_core.wire.images import ImageEncoding
from deft_policies.constant import ConstantPolicy
from deft_server.recording.files import EpisodeFiles, SessionKey, open_file
from deft_server.recording.writer import MAX_WAITING_BYTES, SessionRecording
from deft_server.serving.events import EventBus, FinishedAction, SessionEnded
from tests.recorded_episodes import read_episode


def answered(session_id: str | None = "arm", step: int = 0, caller: str = "lab") -> FinishedAction:
    image = np.random.default_rng(step).integers(0, 256, (16, 16, 3), np.uint8)
    return FinishedAction(
        caller=caller,
        session_id=session_id,
        step=step,
        observation=Observation(image, "lift the cup"),
        options=ActOptions(session_id=session_id),
        chunk=ActionChunk(np.full((1, 7), float(step))),
    )


class Server:
    """An event bus with a recording at it."""

    def __init__(self, open_files: Callable[[], EpisodeFiles]) -> None:
        self.registry = CollectorRegistry()
        self.events = EventBus()
        self.recording = SessionRecording(
            open_files, self.events, self.registry, lambda: ConstantPolicy().info
        )

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def wait_for_steps(self, steps: int) -> None:
        for _ in range(20_000):
            if self.recording.status.steps >= steps:
                return
            time.sleep(0.005)
        raise AssertionError("the steps were not written")

    def wait_for_dropped(self, steps: int) -> None:
        for _ in range(20_000):
            if self.metric("deft_recording_dropped_steps_total") >= steps:
                return
            time.sleep(0.005)
        raise AssertionError("the steps were not left out")

    def wait_until_off(self) -> None:
        for _ in range(20_000):
            if not self.recording.status.is_on:
                return
            time.sleep(0.005)
        raise AssertionError("the recording did not stop")


def files_in(
    directory: Path, kind: type[EpisodeFiles] = EpisodeFiles, **values: Any
) -> Callable[[], EpisodeFiles]:
    return partial(kind, directory, **{"min_free_bytes": 0, **values})


def test_each_episode_of_each_session_is_a_file(tmp_path: Path) -> None:
    server = Server(files_in(tmp_path))
    server.recording.start()
    for step in range(3):
        server.events.publish(answered("arm", step))
        server.events.publish(answered("other/../arm", step))
    server.events.publish(SessionEnded("lab", "arm"))
    server.events.publish(answered("arm", 10))
    server.events.publish(answered("arm", 0, caller="elsewhere"))
    server.recording.stop()
    episodes = [read_episode(path) for path in find_episodes(tmp_path)]
    assert all(path.is_relative_to(tmp_path) for path in find_episodes(tmp_path))
    found = sorted((one.header.caller, one.header.session_id, len(one.steps)) for one in episodes)
    assert found == [
        ("elsewhere", "arm", 1),
        ("lab", "arm", 1),
        ("lab", "arm", 3),
        ("lab", "other/../arm", 3),
    ]
    assert {one.ending for one in episodes} == {Ending.CLOSED}
    assert {one.header.policy for one in episodes} == {"constant"}
    assert server.metric("deft_recorded_steps_total") == 8
    assert server.recording.status.steps == 8


def test_the_noise_of_a_ping_is_not_recorded(tmp_path: Path) -> None:
    """A replay of a robot's episodes began with frames of noise."""
    server = Server(files_in(tmp_path))
    server.recording.start()
    server.events.publish(answered(f"{UNRECORDED}1"))
    server.events.publish(answered("arm"))
    server.events.publish(SessionEnded("lab", f"{UNRECORDED}1"))
    server.recording.stop()
    (path,) = find_episodes(tmp_path)
    assert read_episode(path).header.session_id == "arm"


def test_frames_without_a_session_are_one_episode_of_their_caller(tmp_path: Path) -> None:
    server = Server(files_in(tmp_path))
    server.recording.start()
    for step in range(4):
        server.events.publish(answered(None, step))
    server.recording.stop()
    (path,) = find_episodes(tmp_path)
    episode = read_episode(path)
    assert [step.index for step in episode.steps] == [0, 1, 2, 3]
    assert [step.chunk.actions[0, 0] for step in episode.steps] == [0, 1, 2, 3]
    times = [step.at_s for step in episode.steps]
    assert times[0] == 0
    assert times == sorted(times)


def test_errors_are_not_steps(tmp_path: Path) -> None:
    server = Server(files_in(tmp_path))
    server.recording.start()
    frame = answered()
    values = {**vars(frame), "chunk": None, "error": ValueError("x")}
    server.events.publish(FinishedAction(**values))
    server.recording.stop()
    assert find_episodes(tmp_path) == []


def test_recording_can_be_switched_off_and_on_again(tmp_path: Path) -> None:
    server = Server(files_in(tmp_path))
    assert server.recording.status.reason == "never started"
    for step in range(2):
        server.recording.start()
        server.recording.start()
        server.events.publish(answered("arm", step))
        server.recording.stop()
        server.recording.stop()
        server.events.publish(answered("arm", 99))
    assert not server.events.has_listeners
    assert server.recording.status.reason == "switched off"
    steps = [read_episode(path).steps for path in find_episodes(tmp_path)]
    assert [[step.chunk.actions[0, 0] for step in one] for one in steps] == [[0], [1]]


def test_a_long_episode_is_continued_in_parts(tmp_path: Path) -> None:
    server = Server(files_in(tmp_path, max_file_bytes=5_000))
    server.recording.start()
    for step in range(20):
        server.events.publish(answered("arm", step))
    server.recording.stop()
    episodes = [read_episode(path) for path in find_episodes(tmp_path)]
    assert len(episodes) > 2
    assert [one.header.part for one in episodes] == list(range(len(episodes)))
    assert [step.index for one in episodes for step in one.steps] == list(range(20))


def test_beyond_the_cap_the_oldest_closed_recordings_go(tmp_path: Path) -> None:
    server = Server(files_in(tmp_path, max_file_bytes=2_000, max_total_bytes=20_000))
    server.recording.start()
    for step in range(60):
        server.events.publish(answered("arm", step))
    server.recording.stop()
    kept = [step.index for path in find_episodes(tmp_path) for step in read_episode(path).steps]
    assert kept == list(range(kept[0], 60))
    assert kept[0] > 20
    assert sum(path.stat().st_size for path in find_episodes(tmp_path)) < 25_000


def test_a_clock_set_back_does_not_make_the_newest_recordings_the_oldest(tmp_path: Path) -> None:
    """A robot without a battery clock lost what it had just recorded."""
    for session, wall_s in (("before", 1_700_000_000.0), ("after", 5.0)):
        files = files_in(tmp_path, max_total_bytes=2_500)()
        for number in range(2):
            frame = answered(session, number)
            assert frame.chunk is not None
            step = RecordedStep(
                number, float(number), frame.observation, frame.options, frame.chunk
            )
            files.write(("lab", session), step, wall_s)
        files.close("stopped")
    files = files_in(tmp_path, max_total_bytes=2_500)()
    files._make_room(1_000, free=10**9)
    files.close("stopped")
    kept = find_episodes(tmp_path)
    assert {read_episode(one).header.session_id for one in kept} == {"after"}


def test_two_servers_do_not_record_into_one_folder(tmp_path: Path) -> None:
    """Each deleted what the other was writing, and neither heard of it."""
    first = files_in(tmp_path)()
    with pytest.raises(OSError, match="another server records here"):
        files_in(tmp_path)()
    first.close("stopped")
    files_in(tmp_path)().close("stopped")


class StuckFiles(EpisodeFiles):
    """A disk that takes nothing until it is let."""

    let = threading.Event()

    def write(self, key: SessionKey, step: RecordedStep, wall_s: float) -> None:
        assert self.let.wait(120)
        super().write(key, step, wall_s)


def test_a_disk_that_is_slow_when_stopped_is_left_behind(tmp_path: Path) -> None:
    StuckFiles.let = threading.Event()
    server = Server(files_in(tmp_path, StuckFiles))
    server.recording.start()
    server.events.publish(answered())
    server.recording.stop(timeout_s=0.01)
    assert not server.recording.status.is_on
    assert "did not take" in server.recording.status.reason
    assert server.metric("deft_recording") == 0
    StuckFiles.let.set()


def test_what_waits_for_the_disk_is_bounded_by_bytes(tmp_path: Path) -> None:
    """256 frames of 4096 x 1024 are three gigabytes."""
    StuckFiles.let = threading.Event()
    server = Server(files_in(tmp_path, StuckFiles))
    server.recording.start()
    image = np.zeros((1024, 4096, 3), np.uint8)
    for step in range(20):
        frame = answered("arm", step)
        observation = replace(frame.observation, image=image)
        server.events.publish(FinishedAction(**{**vars(frame), "observation": observation}))
    most = MAX_WAITING_BYTES // image.nbytes
    assert server.metric("deft_recording_dropped_steps_total") == 20 - most
    StuckFiles.let.set()
    server.recording.stop()
    (episode,) = find_episodes(tmp_path)
    assert len(read_episode(episode).steps) == most


def opened(kind: type[FileIO], path: Path, is_new: bool) -> FileIO:
    open_file(path, is_new).close()
    file = kind(path, "r+b")
    file.seek(0, os.SEEK_END)
    return file


class SlowDisk(FileIO):
    """A file that takes a hundred bytes at a time."""

    def write(self, data: object) -> int:
        return super().write(bytes(data)[:100])  # type: ignore[call-overload]


def test_a_disk_that_takes_a_record_in_parts_gets_all_of_it(tmp_path: Path) -> None:
    server = Server(files_in(tmp_path, open_file=partial(opened, SlowDisk)))
    server.recording.start()
    for step in range(3):
        server.events.publish(answered("arm", step))
    server.recording.stop()
    episode = read_episode(find_episodes(tmp_path)[0])
    assert [step.index for step in episode.steps] == [0, 1, 2]


class FullDisk(FileIO):
    """A file on a disk with room for so many bytes, which it takes before it fails."""

    room = 0

    def write(self, data: object) -> int:
        view = bytes(data)[: FullDisk.room]  # type: ignore[call-overload]
        if not view:
            raise OSError(errno.ENOSPC, "No space left on device")
        FullDisk.room -= len(view)
        return super().write(view)


def test_a_full_disk_stops_the_recording_and_keeps_every_whole_step(tmp_path: Path) -> None:
    FullDisk.room = 3_000
    server = Server(files_in(tmp_path, open_file=partial(opened, FullDisk)))
    server.recording.start()
    for step in range(10):
        server.events.publish(answered("arm", step))
    server.wait_until_off()
    server.events.publish(answered("arm", 11))
    assert "No space left" in server.recording.status.reason
    assert server.metric("deft_recording") == 0
    assert server.metric("deft_recording_stops_total", reason="the disk") == 1
    episode = read_episode(find_episodes(tmp_path)[0])
    assert 0 < len(episode.steps) < 10
    # Nothing of the step that did not fit is left: the file ends where its last record does.
    assert episode.ending is Ending.CUT_OFF
    FullDisk.room = 10**9
    server.recording.start()
    server.events.publish(answered("arm", 12))
    server.recording.stop()
    assert len(find_episodes(tmp_path)) == 2


class SmallDisk:
    """A disk of so many bytes, which counts what lies in a folder; others may fill it, too."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size, self.others, self.least_free = folder, size, 0, size

    def num_free(self, where: Path) -> int:
        files = [one for one in self.folder.rglob("*") if one.is_file()]
        free = self.size - self.others - sum(one.stat().st_size for one in files)
        self.least_free = min(self.least_free, free)
        return free


def test_on_a_disk_that_others_fill_recording_waits_for_room_and_goes_on(tmp_path: Path) -> None:
    """It stopped for good, although room was made a minute later."""
    disk = SmallDisk(tmp_path, 10**9)
    files = files_in(tmp_path, min_free_bytes=10_000, num_free=disk.num_free)
    server = Server(files)
    server.recording.start()
    server.events.publish(answered("arm", 0))
    server.wait_for_steps(1)
    disk.others = disk.size
    for step in (1, 2):
        server.events.publish(answered("arm", step))
    server.wait_until_off()
    server.wait_for_dropped(2)  # or there may be room again before it comes to the second
    assert "kept free" in server.recording.status.reason
    assert server.metric("deft_recording") == 0
    disk.others = 0
    server.events.publish(answered("arm", 3))
    server.wait_for_steps(2)
    assert server.recording.status.is_on
    assert server.recording.status.reason == ""
    server.recording.stop()
    assert server.metric("deft_recording_stops_total", reason="no room") == 1
    assert server.metric("deft_recording_dropped_steps_total") == 2
    steps = [read_episode(path).steps for path in find_episodes(tmp_path)]
    assert [[one.chunk.actions[0, 0] for one in part] for part in steps] == [[3]]


def test_on_a_small_disk_the_oldest_goes_and_the_rest_is_left_to_others(tmp_path: Path) -> None:
    """The cap of 20 GiB is never reached there, and recording stopped for good."""
    disk = SmallDisk(tmp_path, 40_000)
    server = Server(files_in(tmp_path, min_free_bytes=10_000, num_free=disk.num_free))
    server.recording.start()
    for step in range(160):
        server.events.publish(answered("arm", step))
    server.recording.stop()
    assert server.recording.status.steps == 160
    assert disk.least_free > 10_000 - 500  # ends of parts are written without looking
    kept = [step.index for path in find_episodes(tmp_path) for step in read_episode(path).steps]
    assert kept == list(range(kept[0], 160))
    assert len(kept) > 10


def test_sessions_that_are_never_reset_do_not_stop_the_recording(tmp_path: Path) -> None:
    """Open recordings were never deleted: their sum beyond the cap was the end."""
    server = Server(files_in(tmp_path, max_total_bytes=30_000))
    server.recording.start()
    for step in range(10):
        for robot in range(16):
            server.events.publish(answered(f"arm {robot}", step))
    server.recording.stop()
    assert server.recording.status.steps == 160
    assert server.recording.status.bytes_kept < 30_000 + 16 * 100
    kept = [step for path in find_episodes(tmp_path) for step in read_episode(path).steps]
    assert max(step.index for step in kept) == 9
    assert server.metric("deft_recording_stops_total", reason="no room") == 0


def test_many_sessions_in_turn_have_a_file_each(tmp_path: Path) -> None:
    """Of 80 robots, all beyond the 64th began a file with every step."""
    server = Server(files_in(tmp_path))
    server.recording.start()
    for step in range(4):
        for robot in range(80):
            server.events.publish(answered(f"arm {robot}", step))
        server.wait_for_steps(80 * (step + 1))
    server.recording.stop()
    episodes = [read_episode(path) for path in find_episodes(tmp_path)]
    assert [len(one.steps) for one in episodes] == [4] * 80


def test_whoever_has_recorded_the_most_loses_the_oldest(tmp_path: Path) -> None:
    """One robot with large pictures pushed out what all others had recorded, also at a restart."""
    for run in range(2):
        server = Server(files_in(tmp_path, max_total_bytes=40_000))
        server.recording.start()
        server.events.publish(answered(f"small {run}", 0, caller="quiet"))
        for step in range(100):
            server.events.publish(answered(f"large {run}", step, caller="busy"))
        server.recording.stop()
    episodes = [read_episode(path) for path in find_episodes(tmp_path)]
    kept = [one.header.session_id for one in episodes if one.header.caller == "quiet"]
    assert kept == ["small 0", "small 1"]
    steps = sum(len(one.steps) for one in episodes if one.header.caller == "busy")
    assert 10 < steps < 200


def test_a_part_that_somebody_deletes_does_not_stop_the_recording(tmp_path: Path) -> None:
    server = Server(files_in(tmp_path))
    server.recording.start()
    for step in range(3):
        server.events.publish(answered("arm", step))
        server.wait_for_steps(step + 1)
        if step == 1:
            (path,) = find_episodes(tmp_path)
            path.unlink()
    server.events.publish(SessionEnded("lab", "arm"))
    server.recording.stop()
    (path,) = find_episodes(tmp_path)
    episode = read_episode(path)
    assert ([step.index for step in episode.steps], episode.ending) == ([2], Ending.CLOSED)
    assert server.recording.status.bytes_kept == path.stat().st_size


def test_no_file_is_open_between_steps(tmp_path: Path) -> None:
    files = files_in(tmp_path)()
    frame = answered()
    assert frame.chunk is not None
    for robot in range(5):
        step = RecordedStep(0, 0.0, frame.observation, frame.options, frame.chunk)
        files.write(("lab", f"arm {robot}"), step, 1e9)
    there = [os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{one}")]  # fmt: skip
    files.close("stopped")
    assert [one for one in there if one.endswith(".deftrec")] == []


def test_parts_of_two_callers_with_one_session_name_are_not_mixed(tmp_path: Path) -> None:
    """Training and replay read episodes of both, half and half."""
    server = Server(files_in(tmp_path, max_file_bytes=5_000))
    server.recording.start()
    for step in range(20):
        server.events.publish(answered("arm-1", step, caller="left"))
        server.events.publish(answered("arm-1", step, caller="right"))
    server.recording.stop()
    episodes = find_parts(tmp_path)
    callers = [{read_header(one).caller for one in parts} for parts in episodes]
    assert sorted(map(sorted, callers)) == [["left"], ["right"]]
    for parts in episodes:
        indices = [step.index for path in parts for step in read_episode(path).steps]
        assert indices == list(range(20))


def test_a_directory_that_cannot_be_made_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = Server(files_in(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match="file"):
        server.recording.start()
    assert not server.recording.status.is_on


def test_what_only_looks_like_a_recording_does_not_stop_the_next_one(tmp_path: Path) -> None:
    """A dangling link kept the server from starting; a folder would have been deleted."""
    (tmp_path / "day" / "folder.deftrec").mkdir(parents=True)
    (tmp_path / "day" / "link.deftrec").symlink_to(tmp_path / "nowhere")
    server = Server(files_in(tmp_path, max_total_bytes=1, max_file_bytes=1))
    server.recording.start()
    assert server.recording.status.is_on
    assert server.recording.status.bytes_kept == 0
    server.events.publish(answered())
    server.recording.stop()
    assert len(list((tmp_path / "day").iterdir())) == 2


def test_a_clock_that_jumps_neither_overwrites_nor_reorders_anything(tmp_path: Path) -> None:
    files = files_in(tmp_path)()
    key = ("lab", "arm")
    for number, wall_s in enumerate((1000.0, 5.0, 1000.0, 1000.0)):
        frame = answered("arm", number)
        assert frame.chunk is not None
        step = RecordedStep(number, float(number), frame.observation, frame.options, frame.chunk)
        files.write(key, step, wall_s)
        if number:
            files.end(key, "reset")
    episodes = [read_episode(path) for path in find_episodes(tmp_path)]
    actions = [[step.chunk.actions[0, 0] for step in one.steps] for one in episodes]
    assert sorted(actions) == [[0, 1], [2], [3]]
    (long,) = [one for one in episodes if len(one.steps) == 2]
    assert [step.at_s for step in long.steps] == [0.0, 1.0]
    files.close("stopped")


def test_idle_episodes_are_ended_when_too_many_go_on(tmp_path: Path) -> None:
    files = files_in(tmp_path, max_episodes=2)()
    server = Server(lambda: files)
    server.recording.start()
    for session in ("a", "b", "c"):
        server.events.publish(answered(session))
    server.recording.stop()
    assert len(find_episodes(tmp_path)) == 3
    files.end(("lab", "a"), "reset")


_ENDLESS_WRITER = """
import sys
from pathlib import Path
from deft_policies.constant import ConstantPolicy
from deft_server.serving.events import EventBus
from prometheus_client import CollectorRegistry
from tests.server.recording.test_recording import Server, answered, files_in
server = Server(files_in(Path(sys.argv[1])))
server.recording.start()
step = 0
while True:
    server.events.publish(answered("arm", step))
    step += 1
    while server.recording.status.steps < step - 2:
        pass
    print(server.recording.status.steps, flush=True)
"""


def test_after_a_kill_everything_that_was_written_is_readable(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    path = os.pathsep.join(str(root / one) for one in ("client", "policies", "server", "."))
    writer = subprocess.Popen(
        [sys.executable, "-c", _ENDLESS_WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    )
    with writer:
        assert writer.stdout is not None
        reported = next(int(line) for line in writer.stdout if int(line) >= 25)
        writer.send_signal(signal.SIGKILL)
    (recorded,) = find_episodes(tmp_path)
    episode = read_episode(recorded)
    assert len(episode.steps) >= reported
    assert [step.index for step in episode.steps] == list(range(len(episode.steps)))
    assert episode.ending is Ending.CUT_OFF


def test_jpeg_can_be_chosen(tmp_path: Path) -> None:
    server = Server(files_in(tmp_path, encoding=ImageEncoding.JPEG))
    server.recording.start()
    server.events.publish(answered())
    server.recording.stop()
    (recorded,) = find_episodes(tmp_path)
    assert b"\xff\xd8\xff" in recorded.read_bytes()


def test_a_session_that_was_forgotten_and_comes_again_is_another_episode(tmp_path: Path) -> None:
    server = Server(files_in(tmp_path))
    server.recording.start()
    for step in (0, 1, 2, 0, 1):
        server.events.publish(answered("arm", step))
    server.recording.stop()
    episodes = [read_episode(path) for path in find_episodes(tmp_path)]
    assert [len(one.steps) for one in episodes] == [3, 2]
    assert {one.ending for one in episodes} == {Ending.CLOSED}


def test_a_recorder_that_breaks_says_so_and_stops(tmp_path: Path) -> None:
    class Broken(EpisodeFiles):
        def write(self, key: SessionKey, step: RecordedStep, wall_s: float) -> None:
            raise ValueError("planted")

    server = Server(files_in(tmp_path, Broken))
    server.recording.start()
    server.events.publish(answered())
    server.wait_until_off()
    assert "planted" in server.recording.status.reason
    assert server.metric("deft_recording_stops_total", reason="the recorder") == 1
