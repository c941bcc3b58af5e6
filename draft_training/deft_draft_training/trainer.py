"""The loop of a training run, resumable to the bit; subclasses say what a step does."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from deft_draft_training.errors import DataError, DivergedError
from deft_draft_training.optimizer import (
    OptimizerConfig,
    TrainingPrecision,
    WeightAverage,
    build_optimizers,
    rate_fraction,
    update,
)
from deft_draft_training.run_directory import RunDirectory

Net = TypeVar("Net", bound=nn.Module)


@dataclass(frozen=True)
class FitConfig:
    """What every training run settles."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: TrainingPrecision = TrainingPrecision.FLOAT32
    steps: int = 20000
    batch_size: int = 16  # over all processes
    average_decay: float = 0.0
    save_every: int = 500
    log_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        names = ("steps", "batch_size", "save_every", "log_every")
        counts = {name: getattr(self, name) for name in names}
        if counts["steps"] == type(self).steps == 0:  # the trainer chooses
            counts.pop("steps")
        if min(counts.values()) < 1:
            raise ValueError(f"each of these must be at least 1, got {counts}")


class Trainer(ABC, Generic[Net]):
    """A module, what changes it, and the loop. A step depends on the seed and its number alone."""

    def __init__(self, config: FitConfig, net: Net) -> None:
        self.net = net
        self.optimizers = build_optimizers(net, config.optimizer)
        self.average = WeightAverage(net, config.average_decay)
        self._rules = config

    @abstractmethod
    def _step(self, step: int) -> Mapping[str, float]:
        """Take a step and return what to log of it."""

    def _update(self, step: int) -> float:
        """Follow the module's gradients; return their norm."""
        fraction = rate_fraction(self._rules.optimizer, step, self._rules.steps)
        norm = update(self.net, self.optimizers, self._rules.optimizer, fraction)
        self.average.follow(self.net)
        return norm

    def _train(self, run: RunDirectory) -> Net:
        """Go on to the configured step and return the (averaged) module."""
        rules, writes = self._rules, run.writes
        first, average = run.load(self.net, self.optimizers)
        self.average.restore(average)
        steps = range(first, rules.steps)
        bar = tqdm(steps, initial=first, total=rules.steps, file=sys.stderr, disable=not writes)
        for step in bar:
            losses, done = self._step(step), step + 1
            if not all(map(math.isfinite, losses.values())):
                raise DivergedError(
                    f"step {step} gave {dict(losses)}; lower the rates of the optimizer, or look "
                    "at the data. What was saved before is as it was"
                )
            if writes and done % rules.log_every == 0:
                run.log(done, losses)
                bar.set_postfix({name: f"{value:.4g}" for name, value in losses.items()})
            if writes and (done % rules.save_every == 0 or done == rules.steps):
                run.save(done, self.net, self.optimizers, self.average.state())
        self.average.copy_to(self.net)
        return self.net


def chosen_at(num_samples: int, batch_size: int, seed: int, step: int) -> NDArray[np.int64]:
    """Indices of a step's samples: every sample once an epoch, in an order of its own.

    A pure function of the step, so that a resumed run sees what the killed one would have seen.
    """
    per_epoch = num_samples // batch_size
    if per_epoch == 0:
        raise DataError(
            f"a batch of {batch_size} needs at least as many samples, got {num_samples}"
        )
    epoch, place = divmod(step, per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(num_samples)
    return order[place * batch_size : (place + 1) * batch_size]
