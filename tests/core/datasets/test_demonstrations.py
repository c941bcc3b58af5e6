"""Demonstration files: what is written comes back, and what was changed is noticed."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from deft_core.datasets.demonstrations import (
    PRIVILEGED,
    Demonstration,
    DemonstrationHeader,
    episode_path,
    find_demonstrations,
    load_demonstration,
    load_header,
)
from deft_core.datasets.episodes import DemonstrationError
from tiny_libero_recipe.demonstration_writer import encode_frame, save_demonstration

STEPS = 3
HEADER = DemonstrationHeader(
    suite="libero_object",
    task=2,
    episode=7,
    trial=7,
    instruction="pick up the salad dressing",
    succeeded=True,
    assets="stand-in 01234567",
    seed=0,
    noise_sigma=0.125,
    widened_metres=0.0,
    frame_size=16,
    encoding="png",
    phases=("approach", "close"),
)


def demonstration(encoding: str = "png") -> Demonstration:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (STEPS, 16, 16, 3), dtype=np.uint8)
    return Demonstration(
        replace(HEADER, encoding=encoding),
        [encode_frame(frame, encoding) for frame in frames],
        labels=rng.random((STEPS, 7)).astype(np.float32),
        executed=rng.random((STEPS, 7)).astype(np.float32),
        state=rng.random((STEPS, 8)).astype(np.float32),
        privileged=rng.random((STEPS, len(PRIVILEGED))).astype(np.float32),
        phase=np.array([0, 0, 1], dtype=np.uint8),
        simulator=rng.random((STEPS, 20)),
    )


def test_an_episode_comes_back_as_it_was_written(tmp_path):
    path, written = episode_path(tmp_path, 2, 7), demonstration()
    save_demonstration(path, written)
    read = load_demonstration(path)
    assert read.header == written.header == load_header(path)
    for name in ("labels", "executed", "state", "privileged", "phase", "simulator"):
        np.testing.assert_array_equal(getattr(read, name), getattr(written, name))
    np.testing.assert_array_equal(read.frames(), written.frames())
    assert list(find_demonstrations(tmp_path)) == [path]
    assert list(find_demonstrations(tmp_path, [3])) == []


def test_png_frames_are_exact_and_jpeg_frames_are_near(tmp_path):
    rng = np.random.default_rng(1)
    frame = np.repeat(np.repeat(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8), 8, 0), 8, 1)
    exact = replace(demonstration(), encoded=[encode_frame(frame, "png")])
    near = replace(demonstration(), encoded=[encode_frame(frame, "jpeg")])
    np.testing.assert_array_equal(exact.frame(0), frame)
    assert np.abs(near.frame(0).astype(int) - frame).mean() < 20


def test_a_flipped_byte_never_gets_into_the_data(tmp_path):
    path = episode_path(tmp_path, 0, 0)
    save_demonstration(path, demonstration())
    whole, caught = path.read_bytes(), 0
    for place in np.linspace(30, len(whole) - 1, 40).astype(int):
        broken = bytearray(whole)
        broken[place] ^= 0x10
        path.write_bytes(bytes(broken))
        with contextlib.suppress(DemonstrationError):
            # It may be a byte of the archive's padding or dates, which nobody reads.
            read = load_demonstration(path)
            np.testing.assert_array_equal(read.labels, demonstration().labels)
            np.testing.assert_array_equal(read.frames(), demonstration().frames())
            caught -= 1
        caught += 1
    assert caught > 30


def test_a_cut_off_file_is_an_error(tmp_path):
    path = episode_path(tmp_path, 0, 0)
    save_demonstration(path, demonstration())
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DemonstrationError, match="damaged"):
        load_demonstration(path)


def test_another_format_and_another_archive_are_told_apart(tmp_path):
    path = episode_path(tmp_path, 0, 0)
    save_demonstration(path, replace(demonstration(), header=replace(HEADER, format=99)))
    with pytest.raises(DemonstrationError, match="format 99"):
        load_demonstration(path)
    np.savez(path, labels=np.zeros(3))
    with pytest.raises(DemonstrationError, match="has no header"):
        load_demonstration(path)
    with pytest.raises(DemonstrationError, match="no demonstration at"):
        load_demonstration(tmp_path / "nothing.npz")


def test_a_damaged_file_is_named_with_what_to_do(tmp_path):
    path = episode_path(tmp_path, 0, 0)
    save_demonstration(path, demonstration())
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 0x10
    path.write_bytes(bytes(whole))
    with pytest.raises(DemonstrationError, match=r"episode0000\.npz.*delete"):
        load_demonstration(path)
