"""Feeds a head's training: samples from shards or computed on the fly, split by episode."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from deft_draft_training.errors import DataError
from deft_draft_training.heads.record import iterate_shards
from deft_draft_training.heads.samples import EpisodeSource, HeadSample, SourcedObservation
from deft_draft_training.heads.target import FeatureTarget


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
    """Samples computed when they are asked for: no disk, and the target runs along."""

    def __init__(self, target: FeatureTarget, source: EpisodeSource) -> None:
        self._target = target
        self._observations: list[SourcedObservation] = list(source.observations())
        self.episodes = np.array([one.episode for one in self._observations])

    def get(self, numbers: Sequence[int]) -> list[HeadSample]:
        """The named samples, freshly computed."""
        chosen = [self._observations[number] for number in numbers]
        return self._target.sample(
            [one.observation for one in chosen], [one.episode for one in chosen], torch.float32
        )


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
