"""The frames that rows answer, episode by episode: recorded ones of a data set, or generated."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from deft_client.datasets.episodes import StoredEpisode, StoredStep
from deft_client.datasets.formats import read_dataset
from deft_client.libero.results.records import TrialKey
from deft_client.libero.simulator.conventions import ACTION_DIM
from deft_client.types import Observation
from deft_policies.benchmark.replay import generate_frames
from deft_server.reproduce.study import ReproductionError


@dataclass(frozen=True, eq=False)
class FrameEpisode:
    """Frames of one session, in order; `key` numbers instructions and their episodes."""

    key: TrialKey
    observations: Sequence[Observation]

    @property
    def instruction(self) -> str:
        """What was asked for."""
        return self.observations[0].instruction


@dataclass(frozen=True, eq=False)
class FrameSet:
    """Whole episodes, one of each instruction in turn, until there are `limit` frames.

    Read anew each time they are iterated over: thousands of frames do not stay in memory.
    """

    data: Path | None  # None: generated
    limit: int
    cameras: tuple[str, ...] = ()

    def episodes(self) -> Iterator[FrameEpisode]:
        """Every episode; the last one may be cut."""
        left = self.limit
        for key, stored in self._order:
            if left > 0:
                seen = [step.observation for step in stored.steps()][:left]
                left -= len(seen)
                yield FrameEpisode(key, seen)

    @cached_property
    def label(self) -> str:
        """How many there are of what, and a digest of every pixel."""
        digest, counts = hashlib.sha256(), []
        for episode in self.episodes():
            counts.append(len(episode.observations))
            for one in episode.observations:
                digest.update(one.image.tobytes())
                digest.update(one.instruction.encode())
        kind = "generated" if self.data is None else "recorded"
        return f"{sum(counts)} {kind} frames of {len(counts)} episodes ({digest.hexdigest()[:12]})"

    @cached_property
    def num_frames(self) -> int:
        """How many there are."""
        return int(self.label.partition(" ")[0])

    @cached_property
    def _order(self) -> list[tuple[TrialKey, StoredEpisode]]:
        found: dict[str, list[StoredEpisode]] = {}
        for stored in self._stored():
            first = next(iter(stored.steps()), None)
            if first is not None:
                found.setdefault(first.observation.instruction, []).append(stored)
        if not found:
            raise ReproductionError(f"{self.data}: none of its episodes has a step")
        keys = [
            (TrialKey("frames", task, number), stored)
            for task, ones in enumerate(found[text] for text in sorted(found))
            for number, stored in enumerate(ones)
        ]
        return sorted(keys, key=lambda one: (one[0].trial, one[0].task))

    def _stored(self) -> Iterator[StoredEpisode]:
        if self.data is not None:
            yield from read_dataset(self.data, self.cameras)
            return
        generated: dict[str, list[StoredStep]] = {}
        for frame in generate_frames(self.limit):
            step = StoredStep(frame.observation, np.zeros(ACTION_DIM))
            generated.setdefault(frame.episode, []).append(step)
        for name, steps in generated.items():
            yield StoredEpisode(name, steps.__iter__)
