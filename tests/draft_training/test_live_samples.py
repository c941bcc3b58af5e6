"""Features computed on the fly are those that would be recorded; frames stay out of memory."""

import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from deft_core.types import Observation
from deft_draft_training.heads.fit import LiveSamples
from deft_draft_training.heads.samples import EpisodeSource
from tests.demonstrations import write_demonstrations
from tests.draft_training.golden_target import tiny_target


class Watched(EpisodeSource):
    """Frames of which it is known whether anybody still holds them."""

    frames: list[weakref.ref[np.ndarray]] = []

    def observations(self) -> Iterator[tuple[int, Observation]]:
        for number in range(9):
            frame = np.full((8, 8, 3), number, np.uint8)
            self.frames.append(weakref.ref(frame))
            yield number // 3, Observation(frame, "lift the cup")


def test_frames_of_live_samples_are_not_held_in_memory():
    samples = LiveSamples(tiny_target(), Watched(()))
    held = sum(frame() is not None for frame in Watched.frames)
    assert held <= 1  # the loop's last
    assert samples.episodes.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_live_samples_are_those_of_the_frames_in_any_order(tmp_path: Path):
    source = EpisodeSource((write_demonstrations(tmp_path, episodes=2, steps=2),))
    frames = list(source.observations())
    for number, sample in zip((3, 0), LiveSamples(tiny_target(), source).get([3, 0]), strict=True):
        episode, observation = frames[number]
        (fresh,) = tiny_target().sample([observation], [episode], torch.float32)
        assert sample.episode == episode
        assert torch.equal(sample.tokens, fresh.tokens)
        torch.testing.assert_close(sample.hidden, fresh.hidden, rtol=1e-4, atol=1e-4)
