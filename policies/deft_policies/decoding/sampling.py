"""Choosing tokens from logits: the largest, or a draw whose noise is fixed by seed and action."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

MOST_TRIES = 8  # drafts of one position that the ratio test may look at


def first_maximum(logits: Tensor) -> Tensor:
    """Index of the largest value along the last axis; among equals the lowest.

    NumPy's search is vectorised and torch's on a CPU is not: ten times faster over 32,000 columns.
    """
    is_watched = is_in_torch_dispatch_mode()  # what records operations sees nothing of NumPy's
    if logits.device.type == "cpu" and not logits.requires_grad and not is_watched:
        return torch.from_numpy(np.asarray(np.argmax(logits.numpy(), axis=-1)))
    return logits.argmax(dim=-1)


def all_finite(sums: Sequence[Tensor]) -> Tensor:
    """Which rows had only finite logits, given the sum of each pass's, [row] each.

    NaN and infinity survive any sum, so one number per row and pass tells of all of them.
    """
    return torch.stack(tuple(sums)).isfinite().all(dim=0)


def top_gap(logits: Tensor, best: Tensor) -> Tensor:
    """How far the largest value along the last axis is above the second; `best` is its index."""
    index = best.unsqueeze(-1)
    others = logits.scatter(-1, index, float("-inf"))
    return logits.gather(-1, index).squeeze(-1) - others.amax(dim=-1)


def target_odds(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature)."""
    return torch.softmax(logits / temperature, dim=-1)


class Stream(Enum):
    """What random numbers are drawn for."""

    ACTION = 0  # the target's tokens, and the coins of their drafts
    DRAFT = 1  # the head's own draws


class TokenChooser(Protocol):
    """Picks one token per row."""

    def choose(self, logits: Tensor) -> Tensor:
        """Indices [row] into the last axis of [row, vocabulary]."""


class Greedy:
    """The largest logit; among equals the lowest index."""

    def choose(self, logits: Tensor) -> Tensor:
        """Return the first maximum."""
        return first_maximum(logits)


@dataclass(frozen=True)
class Sampling:
    """How a policy draws tokens; a temperature of 0 means greedy."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, got {self.seed}")
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")

    def chooser(self, draws: Sequence[int], device: torch.device) -> TokenChooser:
        """A chooser for rows that have drawn `draws` actions before, each with its own stream."""
        if self.temperature == 0.0:
            return Greedy()
        return Sampled(self.temperature, self._generators(draws, device))

    def position_noise(
        self, draws: Sequence[int], like: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Exponential noise [row, position, vocabulary] and coins [row, position, try] of a batch.

        `like` is [vocabulary]. The noise is that of `chooser`, position after position.
        """
        noise = like.new_empty(len(draws), length, like.shape[0])
        coins = like.new_empty(len(draws), length, MOST_TRIES)
        for row, generator in enumerate(self._generators(draws, like.device)):
            for position in range(length):
                noise[row, position].exponential_(generator=generator)
            coins[row].uniform_(generator=generator)
        return noise, coins

    def _generators(
        self, draws: Sequence[int], device: torch.device
    ) -> tuple[torch.Generator, ...]:
        """One per row: the same seed and the same number of earlier draws give the same noise.

        What else is in the batch makes no difference.
        """
        return tuple(self.generator(Stream.ACTION, draw, device) for draw in draws)

    def generator(self, stream: "Stream", number: int, device: torch.device) -> torch.Generator:
        """Random numbers for one purpose; no two purposes, seeds or numbers share a stream."""
        words = np.random.SeedSequence((self.seed, stream.value, number)).generate_state(2)
        return torch.Generator(device).manual_seed(int(words[0]) << 31 ^ int(words[1]))


@dataclass(frozen=True)
class Sampled:
    """Draws from softmax(logits / temperature), one generator per row.

    Dividing probabilities by exponential noise and taking the largest is an exact draw, and needs
    no word with the host.
    """

    temperature: float
    generators: tuple[torch.Generator, ...]

    def choose(self, logits: Tensor) -> Tensor:
        """Draw one index per row."""
        noise = torch.empty_like(logits)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        return (target_odds(logits, self.temperature) / noise).argmax(dim=-1)
