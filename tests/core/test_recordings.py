"""A recording can be read up to its last whole step, whatever happened to its writer."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_core import recordings
from deft_core.recordings import (
    SIGNATURE,
    SUFFIX,
    Ending,
    EpisodeHeader,
    RecordedStep,
    RecordingError,
    StepReader,
    encode_end,
    encode_header,
    encode_step,
    find_episodes,
    read_header,
)
from deft_core.types import ActionChunk, ActOptions, DecodeTrace, Observation, PassTrace
from deft_core.wire.images import ImageEncoding
from tests.recorded_episodes import read_episode

HEADER = EpisodeHeader("arm-1", 1_700_000_000.5, "constant", "lab", 0, {"version": "0.1.0"})


def make_step(index: int) -> RecordedStep:
    rng = np.random.default_rng(index)
    image = rng.integers(0, 256, (8, 6, 3), dtype=np.uint8)
    one = PassTrace(True, (5, 6), (-1, 0), ("", "previous"), (6, 7), (1,), 7, 0.5, 2.0)
    return RecordedStep(
        index=index,
        at_s=index * 0.1,
        observation=Observation(
            image, "lift the cup", {"wrist": image[:4]}, np.arange(3, dtype=np.float32)
        ),
        options=ActOptions(session_id="arm-1", decoding="lossless", radius=2),
        chunk=ActionChunk(
            rng.normal(size=(1, 7)),
            trace=DecodeTrace("lossless", (6, 7), (6, 7), (0.5, 0.25), (one,)),
        ),
    )


def write(path: Path, *parts: bytes) -> Path:
    path.write_bytes(b"".join(parts))
    return path


def assert_same_step(read: RecordedStep, written: RecordedStep) -> None:
    assert (read.index, read.at_s, read.options) == (written.index, written.at_s, written.options)
    np.testing.assert_array_equal(read.observation.image, written.observation.image)
    np.testing.assert_array_equal(
        read.observation.cameras["wrist"], written.observation.cameras["wrist"]
    )
    np.testing.assert_array_equal(read.observation.state, written.observation.state)
    np.testing.assert_array_equal(read.chunk.actions, written.chunk.actions)
    assert read.chunk.trace == written.chunk.trace


def test_a_closed_episode_reads_back_as_it_was_written(tmp_path: Path) -> None:
    steps = [make_step(index) for index in range(3)]
    path = write(
        tmp_path / "a.deftrec", encode_header(HEADER), *map(encode_step, steps), encode_end("reset")
    )
    episode = read_episode(path)
    assert episode.header == HEADER == read_header(path)
    assert episode.ending is Ending.CLOSED
    for read, written in zip(episode.steps, steps, strict=True):
        assert_same_step(read, written)
    assert [step.index for step in StepReader(path)] == [0, 1, 2]


def test_jpeg_frames_are_smaller_and_close_while_raw_ones_are_exact(tmp_path: Path) -> None:
    smooth = np.tile(np.arange(0, 224, dtype=np.uint8)[None, :, None], (224, 1, 3))
    step = RecordedStep(
        0, 0.0, Observation(smooth, "x"), ActOptions(), ActionChunk(np.zeros((1, 7)))
    )
    sizes = {}
    for encoding in ImageEncoding:
        record = encode_step(step, encoding)
        sizes[encoding] = len(record)
        path = write(tmp_path / f"{encoding.value}.deftrec", encode_header(HEADER), record)
        read = read_episode(path).steps[0].observation.image.astype(int)
        allowed = 3 if encoding is ImageEncoding.JPEG else 0
        assert np.abs(read - smooth).max() <= allowed
    assert sizes[ImageEncoding.JPEG] < sizes[ImageEncoding.RAW] / 4


@given(st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_a_file_cut_anywhere_yields_every_whole_step_before_the_cut(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    header = encode_header(HEADER)
    records = [encode_step(make_step(index)) for index in range(3)]
    whole = header + b"".join(records)
    cut = len(header) + cut % (len(whole) - len(header))
    path = write(tmp_path_factory.getbasetemp() / "cut.deftrec", whole[:cut])
    ends = np.cumsum([len(header), *map(len, records)])[1:]
    episode = read_episode(path)
    assert len(episode.steps) == int((ends <= cut).sum())
    assert episode.ending is Ending.CUT_OFF


def test_a_flipped_bit_ends_the_recording_at_the_step_before(tmp_path: Path) -> None:
    records = [encode_step(make_step(index)) for index in range(3)]
    damaged = bytearray(records[1])
    damaged[len(damaged) // 2] ^= 1
    path = write(
        tmp_path / "a.deftrec", encode_header(HEADER), records[0], bytes(damaged), records[2]
    )
    episode = read_episode(path)
    assert [step.index for step in episode.steps] == [0]
    assert episode.ending is Ending.DAMAGED


def test_a_record_that_claims_to_be_huge_is_damage_and_not_an_allocation(tmp_path: Path) -> None:
    path = write(tmp_path / "a.deftrec", encode_header(HEADER), b"\xff" * 8)
    assert read_episode(path).ending is Ending.DAMAGED


def test_zeros_end_the_recording_at_the_step_before(tmp_path: Path) -> None:
    """A disk that lost its last blocks gives back zeros: length 0 with a checksum of 0 fits."""
    record = encode_step(make_step(0))
    path = write(tmp_path / "a.deftrec", encode_header(HEADER), record, bytes(64), encode_end("x"))
    episode = read_episode(path)
    assert [step.index for step in episode.steps] == [0]
    assert episode.ending is Ending.DAMAGED


def test_a_record_that_nobody_could_read_is_not_written(monkeypatch) -> None:
    monkeypatch.setattr(recordings, "MAX_RECORD_BYTES", 100)
    with pytest.raises(OSError, match="of 100 bytes"):
        encode_step(make_step(0))


def test_what_is_larger_than_a_server_takes_is_recorded_all_the_same(tmp_path: Path) -> None:
    """Limits of the wire protect a server; what a robot wrote down it can read again."""
    observation = Observation(
        np.zeros((2, 5000, 3), np.uint8), "x" * 5000, state=np.zeros(2000, np.float32)
    )
    step = RecordedStep(0, 0.0, observation, ActOptions("s" * 200), make_step(0).chunk)
    path = write(tmp_path / "a.deftrec", encode_header(HEADER), encode_step(step))
    assert read_episode(path).steps[0].observation.image.shape == (2, 5000, 3)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not a recording"),
        (b"PK\x03\x04....", "not a recording"),
        (SIGNATURE, "cut off"),
        (SIGNATURE + encode_end("x"), "header is unusable"),
        (encode_header(HEADER) + encode_header(HEADER)[len(SIGNATURE) :], "kind"),
    ],
)
def test_what_is_no_recording_is_refused_with_the_name_of_the_file(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    path = write(tmp_path / "strange.deftrec", content)
    with pytest.raises(RecordingError, match=f"strange.deftrec.*{complaint}"):
        read_episode(path)


def test_recordings_are_found_in_order_and_a_wrong_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    names = [tmp_path / f"b/2{SUFFIX}", tmp_path / f"a{SUFFIX}"]
    for name in names:
        write(name, encode_header(HEADER))
    (tmp_path / "note.txt").write_text("not one")
    assert find_episodes(tmp_path) == sorted(names)
    assert find_episodes(names[0]) == [names[0]]
    with pytest.raises(RecordingError, match="nowhere"):
        find_episodes(tmp_path / "nowhere")


def test_a_pipe_in_place_of_a_recording_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / f"a{SUFFIX}"
    os.mkfifo(path)
    with pytest.raises(RecordingError, match="not a regular file"):
        read_header(path)
    with pytest.raises(RecordingError, match="not a regular file"):
        list(StepReader(path))
