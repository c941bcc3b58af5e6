"""From demonstrations to a policy that writes FAST codes: statistics, tokenizers, codes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from deft_core.datasets.demonstrations import Demonstration
from deft_core.peers.conventions import to_robosuite
from deft_draft_training.errors import DataError
from tiny_libero_recipe.data import PolicySamples
from tiny_libero_recipe.episodes import auxiliary_positions, request_of, step_weights
from tiny_libero_recipe.fast_checkpoint import write_fast_checkpoint
from tiny_libero_recipe.fast_format import FastFormat, fit_format, measure, read_format
from tiny_libero_recipe.fast_model import FastNet
from tiny_libero_recipe.language import PATTERNS, PLACES, THINGS
from tiny_libero_recipe.numbers import chunks

BEHIND = -1  # in a row of codes: the answer has ended


@dataclass(frozen=True, eq=False)
class PreparedFast:
    """Everything a training run starts from."""

    format: FastFormat
    samples: PolicySamples  # labels are codes, `BEHIND` behind an answer's end
    states: NDArray[np.float32]  # [sample, dim] of the robot, raw
    frame_size: int

    @property
    def mean_codes(self) -> float:
        """Of an answer."""
        return float((self.samples.labels != BEHIND).sum(axis=1).mean())


def prepare_fast(
    episodes: Sequence[Demonstration], num_codes: int, kept: Path | None = None
) -> PreparedFast:
    """Build samples. Statistics and tokenizers are those of a checkpoint if one is kept."""
    if not episodes:
        raise DataError("none of the demonstrations succeeded; nothing to train on")
    actions = [np.stack([to_robosuite(row) for row in one.labels]) for one in episodes]
    ahead = np.concatenate([chunks(one) for one in actions])
    states = np.concatenate([one.state for one in episodes])
    if kept is not None:
        given = read_format(kept)
    else:
        instructions = {request_of(one).instruction for one in episodes}
        sentences = {
            pattern.format(thing=thing, place=place)
            for pattern, thing, place in product(PATTERNS, THINGS, PLACES)
        }
        statistics = measure(states, np.concatenate(actions))
        given = fit_format(statistics, list(ahead), instructions | sentences, num_codes)
    codes = [given.encode(chunk) for chunk in ahead]
    labels = np.full((len(codes), max(map(len, codes))), BEHIND)
    for row, written in zip(labels, codes, strict=True):
        row[: len(written)] = written
    ends = np.cumsum([len(one) for one in episodes])[:-1]
    samples = PolicySamples.join(
        _samples(one, codes_of)
        for one, codes_of in zip(episodes, np.split(labels, ends), strict=True)
    )
    return PreparedFast(given, samples, states, episodes[0].header.frame_size)


def _samples(episode: Demonstration, codes: NDArray[np.int64]) -> PolicySamples:
    return PolicySamples(
        encoded=episode.encoded,
        labels=codes,
        positions=auxiliary_positions(episode),
        weights=step_weights(episode),
        requests=[request_of(episode)] * len(episode),
        thoughts=[""] * len(episode),
    )


def write_fast(net: FastNet, prepared: PreparedFast, directory: Path, dtype: torch.dtype) -> None:
    """Write what inference uses; the auxiliary head stays behind."""
    tensors = {
        name: tensor.to("cpu", dtype).contiguous() for name, tensor in net.named_tensors().items()
    }
    write_fast_checkpoint(directory, prepared.format, tensors, prepared.frame_size)
