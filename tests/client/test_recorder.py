"""What a policy saw and answered can be read back, whatever happened to the writer."""

import resource
import signal
import subprocess
import sys
import threading
from io import BytesIO

import numpy as np
import pytest

from deft_client import recorder as recorder_module
from deft_client.recorder import MAX_WAITING, Recorder
from deft_core.files import append_whole
from deft_core.recordings import Ending, find_episodes
from deft_core.types import ActionChunk, ActOptions, Observation
from deft_core.wire.images import ImageEncoding
from tests.core.samples import frame, full_answer
from tests.recorded_episodes import read_episode


class CountingPolicy:
    """Answers with the number of the observation since the last reset."""

    session_id = "arm-1"

    def __init__(self) -> None:
        self.count = 0
        self.resets: list[str | None] = []

    def act(self, observation, options=None):
        self.count += 1
        return ActionChunk(np.full((1, 7), float(self.count)), full_answer().timings)

    def reset(self, session_id=None):
        self.count = 0
        self.resets.append(session_id)


def observation(number: int) -> Observation:
    return Observation(frame(seed=number), f"step {number}")


def test_an_episode_can_be_replayed_from_its_recording(tmp_path):
    options = ActOptions(statistics_key="libero_goal")
    with Recorder(CountingPolicy(), tmp_path) as recorder:
        for number in range(3):
            assert recorder.act(observation(number), options).actions[0, 0] == number + 1
    episode = read_episode(recorder.path)
    assert episode.ending is Ending.CLOSED
    assert episode.header.session_id == "arm-1"
    replayed = CountingPolicy()
    for number, step in enumerate(episode.steps):
        assert step.index == number
        assert step.options == options
        np.testing.assert_array_equal(step.observation.image, frame(seed=number))
        again = replayed.act(step.observation, step.options)
        assert again.actions.tobytes() == step.chunk.actions.tobytes()
        assert again.timings == step.chunk.timings


def test_every_reset_starts_a_file_and_reaches_the_policy(tmp_path):
    policy = CountingPolicy()
    with Recorder(policy, tmp_path) as recorder:
        recorder.reset()
        for _ in range(2):
            recorder.act(observation(0))
            recorder.act(observation(1))
            recorder.reset("arm-1")
    episodes = [read_episode(path) for path in find_episodes(tmp_path)]
    assert [len(episode.steps) for episode in episodes] == [2, 2]
    assert [episode.steps[0].index for episode in episodes] == [0, 0]
    assert policy.resets == [None, "arm-1", "arm-1"]


def test_jpeg_recordings_are_smaller_where_that_matters_more_than_pixels(tmp_path):
    smooth = Observation(np.tile(np.arange(256, dtype=np.uint8)[:, None, None], (1, 256, 3)), "x")
    sizes = {}
    for encoding in (ImageEncoding.RAW, ImageEncoding.JPEG):
        with Recorder(CountingPolicy(), tmp_path, encoding) as recorder:
            recorder.act(smooth)
        sizes[encoding] = recorder.path.stat().st_size
    assert sizes[ImageEncoding.JPEG] < sizes[ImageEncoding.RAW] / 10


def test_a_disk_that_fails_stops_the_recording_and_not_the_robot(tmp_path, caplog):
    blocked = tmp_path / "a file, not a directory"
    blocked.write_text("")
    with Recorder(CountingPolicy(), blocked) as recorder:
        answers = [recorder.act(observation(number)).actions[0, 0] for number in range(3)]
    assert answers == [1, 2, 3]
    assert isinstance(recorder.problem, OSError)
    assert caplog.text.count("recording to") == 1


@pytest.fixture
def stuck_disk(monkeypatch):
    """Takes nothing until it is let go."""
    let_go = threading.Event()

    def append(file, data):
        assert let_go.wait(60)
        append_whole(file, data)

    monkeypatch.setattr("deft_client.recorder.append_whole", append)
    yield let_go
    let_go.set()


def test_a_disk_that_hangs_does_not_hold_up_the_robot(tmp_path, stuck_disk):
    camera = frame(seed=0).copy()
    with Recorder(CountingPolicy(), tmp_path) as recorder:
        for number in range(3):
            camera[:] = frame(seed=number)  # the memory is the camera's
            assert recorder.act(Observation(camera, "wait")).actions[0, 0] == number + 1
        assert recorder.path is None or recorder.path.stat().st_size == 0
        stuck_disk.set()
    steps = read_episode(recorder.path).steps
    assert [step.chunk.actions[0, 0] for step in steps] == [1, 2, 3]
    for number, step in enumerate(steps):
        np.testing.assert_array_equal(step.observation.image, frame(seed=number))


def test_a_disk_that_is_too_slow_ends_the_recording(tmp_path, stuck_disk):
    with Recorder(CountingPolicy(), tmp_path) as recorder:
        for number in range(3 * MAX_WAITING):
            assert recorder.act(observation(0)).actions[0, 0] == number + 1
        assert "too slow" in str(recorder.problem)
        stuck_disk.set()
    # Nobody waits for a recording that was given up: its header may come later, or never.
    is_there = recorder.path is not None and recorder.path.stat().st_size > 0
    assert not is_there or len(read_episode(recorder.path).steps) <= 1


def test_large_pictures_wait_for_the_disk_up_to_a_number_of_bytes(tmp_path, stuck_disk):
    """Three cameras of 1080p were 1.2 GB of copies before the number of steps was too large."""
    image = np.zeros((1080, 1920, 3), np.uint8)
    large = Observation(image, "wait", cameras={"left": image, "right": image})
    num_bytes = 3 * image.nbytes
    fit = recorder_module.MAX_WAITING_BYTES // num_bytes
    assert 1 <= fit < MAX_WAITING
    with Recorder(CountingPolicy(), tmp_path) as recorder:
        for _ in range(fit):
            recorder.act(large)
        assert recorder.problem is None
        recorder.act(large)
        assert "too slow" in str(recorder.problem)
        stuck_disk.set()


def test_a_step_that_is_larger_than_all_room_is_recorded_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "MAX_WAITING_BYTES", 1)
    with Recorder(CountingPolicy(), tmp_path) as recorder:
        for number in range(3):
            recorder.act(observation(number))
            recorder.flush()
    assert len(read_episode(recorder.path).steps) == 3


def test_closing_ends_the_thread_that_writes(tmp_path):
    before = threading.active_count()
    recorder = Recorder(CountingPolicy(), tmp_path)
    recorder.act(observation(0))
    assert threading.active_count() == before + 1
    recorder.close()
    assert threading.active_count() == before
    assert read_episode(recorder.path).ending is Ending.CLOSED
    assert recorder.act(observation(1)).actions[0, 0] == 2  # the robot goes on, unrecorded
    recorder.flush()
    recorder.close()
    assert len(find_episodes(tmp_path)) == 1


def test_a_mistake_stops_the_recording_with_its_reason_and_not_the_robot(
    tmp_path, monkeypatch, caplog
):
    """It once ended the thread, after which the disk was said to be too slow."""

    def fail(step, encoding):
        raise TypeError("no such encoding")

    monkeypatch.setattr(recorder_module, "encode_step", fail)
    with Recorder(CountingPolicy(), tmp_path) as recorder:
        for number in range(3):
            assert recorder.act(observation(number)).actions[0, 0] == number + 1
            recorder.flush()
        assert isinstance(recorder.problem, TypeError)
    assert caplog.text.count("recording to") == 1
    assert "no such encoding" in caplog.text


@pytest.fixture
def limit_file_size():
    """Makes every file end at a size, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_full_in_mid_step_keeps_the_steps_before_it(tmp_path, limit_file_size):
    with Recorder(CountingPolicy(), tmp_path) as recorder:
        recorder.act(observation(0))
        recorder.flush()
        limit_file_size(recorder.path.stat().st_size + 40)
        assert recorder.act(observation(1)).actions[0, 0] == 2
        recorder.flush()
        limit_file_size(resource.RLIM_INFINITY)  # room again, but behind half a step
        recorder.act(observation(2))
    assert recorder.problem is not None
    episode = read_episode(recorder.path)
    assert len(episode.steps) == 1
    assert episode.ending is Ending.CUT_OFF


class InParts(BytesIO):
    """Takes seven bytes at a time, and then nothing more."""

    room = 100

    def write(self, data):
        taken = bytes(data)[: min(7, self.room)]
        self.room -= len(taken)
        return super().write(taken)


def test_a_disk_that_takes_a_step_in_parts_gets_all_of_it_or_nothing():
    file = InParts()
    append_whole(file, bytes(range(60)))
    assert file.getvalue() == bytes(range(60))
    with pytest.raises(OSError, match="20 of 60"):
        append_whole(file, bytes(60))
    assert file.getvalue() == bytes(range(60))


def test_an_episode_that_ends_with_an_exception_says_so(tmp_path):
    with pytest.raises(RuntimeError), Recorder(CountingPolicy(), tmp_path) as recorder:  # noqa: PT012
        recorder.act(observation(0))
        raise RuntimeError("the robot fell over")
    assert b"RuntimeError" in recorder.path.read_bytes()


WRITER = """
import pathlib, sys
import numpy as np
from deft_client.recorder import MAX_WAITING, Recorder
from deft_core.types import ActionChunk, Observation

class Still:
    session_id = "arm-1"
    def act(self, observation, options=None):
        return ActionChunk(np.zeros((1, 7)))

recorder = Recorder(Still(), pathlib.Path(sys.argv[1]))
while True:
    recorder.act(Observation(np.zeros((8, 8, 3), np.uint8), "wait"))
    recorder.flush()
    sys.stdout.write("step\\n")
    sys.stdout.flush()
"""


def test_a_killed_writer_leaves_every_whole_step(tmp_path):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with writer:
        for _ in range(5):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    (path,) = find_episodes(tmp_path)
    episode = read_episode(path)
    assert len(episode.steps) >= 5
    assert episode.ending is Ending.CUT_OFF
