"""Choosing a token from the target's scores: the best one, or one drawn by temperature."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deft_policies.decoding.maximum import first_maximum


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
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")

    def chooser(self, draws: Sequence[int], device: torch.device) -> TokenChooser:
        """A chooser for rows that have drawn `draws` actions before, each with its own stream.

        The same seed and the same number of earlier draws give the same noise, whatever else is
        in the batch.
        """
        if self.temperature == 0.0:
            return Greedy()
        generators = []
        for draw in draws:
            generator = torch.Generator(device)
            generator.manual_seed((self.seed * 1_000_003 + draw) % 2**63)
            generators.append(generator)
        return Sampled(self.temperature, tuple(generators))


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
        probabilities = torch.softmax(logits / self.temperature, dim=-1)
        return (probabilities / noise).argmax(dim=-1)
