"""Feeds a head's training: samples from shards or computed on the fly, split by episode."""

import pickle
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from deft_draft_training.errors import DataError
from deft_draft_training.heads.record import iterate_shards
from deft_draft_training.heads.samples import EpisodeSource, HeadSample
from deft_draft_training.heads.target import FeatureTarget
from deft_draft_training.run_directory import explained


class SampleStore(Protocol):
    """Samples by number."""

    @property
    def episodes(self) -> NDArray[np.int64]:
        """The episode of each sample."""

    def get(self, numbers: Sequence[int]) -> list[HeadSample]:
        """The named samples."""


class RecordedSamples:
    """Samples of a folder of shards, read from there when they are used."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        shards = iterate_shards(folder, fingerprint)
        self._samples = [sample for shard in shards for sample in shard]
        if not self._samples:
            raise DataError(f"{folder} holds no samples; run `deft train record` into it")
        self.episodes = np.array([one.episode for one in self._samples])

    def get(self, numbers: Sequence[int]) -> list[HeadSample]:
        """The named samples."""
        return [self._samples[number] for number in numbers]


class LiveSamples:
    """Samples computed when they are asked for: the target runs along.

    Decoded frames may be more than memory holds. They lie in a temporary file without a name.
    """

    def __init__(self, target: FeatureTarget, source: EpisodeSource) -> None:
        self._target = target
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        weakref.finalize(self, self._file.close)
        self._places: list[int] = []
        episodes: list[int] = []
        with explained(Path(tempfile.gettempdir())):
            for one in source.observations():
                self._places.append(self._file.tell())
                pickle.dump(one.observation, self._file)
                episodes.append(one.episode)
        self.episodes = np.array(episodes)

    def get(self, numbers: Sequence[int]) -> list[HeadSample]:
        """The named samples, freshly computed."""
        observations = []
        for number in numbers:
            self._file.seek(self._places[number])
            observations.append(pickle.load(self._file))
        episodes = [int(self.episodes[number]) for number in numbers]
        return self._target.sample(observations, episodes, torch.float32)


@dataclass(frozen=True, eq=False)
class Split:
    """Numbers of samples to train on and to judge by; no episode is in both."""

    train: NDArray[np.int64]
    held_out: NDArray[np.int64]


def split_by_episode(episodes: NDArray[np.int64], held_out_share: float, seed: int) -> Split:
    """Hold out whole episodes, at least one."""
    names = np.unique(episodes)
    if len(names) < 2:
        raise DataError(f"a split needs at least two episodes, got {len(names)}")
    number = min(max(1, round(held_out_share * len(names))), len(names) - 1)
    chosen = np.random.default_rng(seed).permutation(names)[:number]
    is_held_out = np.isin(episodes, chosen)
    return Split(np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out))
