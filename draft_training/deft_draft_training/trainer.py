"""The loop of a training run, resumable to the bit; subclasses say what a step does.

`Workers` are several processes as one: who takes which samples, and how gradients become one.
"""

import math
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from tqdm import tqdm

from deft_draft_training.errors import ConfigError, DataError, DivergedError
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
SAVES = 10


@dataclass(frozen=True)
class FitConfig:
    """What every training run settles."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: TrainingPrecision = TrainingPrecision.FLOAT32
    steps: int = 20000
    batch_size: int = 16  # over all processes
    average_decay: float = 0.0
    save_every: int = 500  # and at least SAVES times a run, and where it is interrupted
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
        """Go on to the configured step and return the (averaged) module.

        Ctrl-C ends it behind the step that is under way, and saves first.
        """
        rules, writes = self._rules, run.writes
        first, average = run.load(self.net, self.optimizers)
        self.average.restore(average)
        save_every = min(rules.save_every, math.ceil(rules.steps / SAVES))
        steps = range(first, rules.steps)
        bar = tqdm(steps, initial=first, total=rules.steps, file=sys.stderr, disable=not writes)
        with _interrupts_wait() as is_interrupted:
            for step in bar:
                losses, done = self._step(step), step + 1
                if not all(map(math.isfinite, losses.values())):
                    raise DivergedError(
                        f"step {step} gave {dict(losses)}; lower the rates of the optimizer, or "
                        "look at the data. What was saved before is as it was"
                    )
                if writes and done % rules.log_every == 0:
                    run.log(done, losses)
                    bar.set_postfix({name: f"{value:.4g}" for name, value in losses.items()})
                is_last = is_interrupted() or done == rules.steps
                if writes and (is_last or done % save_every == 0):
                    run.save(done, self.net, self.optimizers, self.average.state())
                if is_interrupted() and done < rules.steps:
                    bar.close()
                    raise KeyboardInterrupt(
                        f"stopped and saved at step {done} of {rules.steps}; "
                        "the same command goes on from here"
                    )
        self.average.copy_to(self.net)
        return self.net


@contextmanager
def _interrupts_wait() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the end of a step; a second one does not. Asks whether there was one."""
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came.is_set
        return

    def note(*_: object) -> None:
        came.set()
        signal.signal(signal.SIGINT, old_handler)

    old_handler = signal.signal(signal.SIGINT, note)
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGINT, old_handler)


def chosen_at(num_samples: int, batch_size: int, seed: int, step: int) -> NDArray[np.int64]:
    """Indices of a step's samples: every sample once an epoch, in an order of its own.

    A pure function of the step, so that a resumed run sees what the killed one would have seen.
    """
    per_epoch = num_samples // batch_size
    if per_epoch == 0:
        raise DataError(
            f"a batch of {batch_size} needs at least as many samples, got {num_samples}"
        )
    epoch, number = divmod(step, per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(num_samples)
    return order[number * batch_size : (number + 1) * batch_size]


@dataclass(frozen=True)
class Workers:
    """This process among the others; one alone by default."""

    rank: int = 0
    count: int = 1
    device: str = "cpu"  # on which they exchange numbers

    @staticmethod
    def from_torchrun() -> "Workers":
        """Join the processes that torchrun started; alone if it started none."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            return Workers()
        if not torch.cuda.is_available():
            dist.init_process_group("gloo")
            return Workers(dist.get_rank(), count)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # what "cuda" means from here on
        dist.init_process_group("nccl")
        return Workers(dist.get_rank(), count, "cuda")

    def share(self, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """This process's part of a batch: equal parts, so that means of means are means."""
        if len(chosen) % self.count:
            raise ConfigError(
                f"batch_size {len(chosen)} cannot be shared by {self.count} processes"
            )
        size = len(chosen) // self.count
        return chosen[self.rank * size : (self.rank + 1) * size]

    def average_gradients(self, module: nn.Module) -> None:
        """Replace every gradient by its mean over the processes, in one message."""
        if self.count == 1:
            return
        gradients = [
            parameter.grad for parameter in module.parameters() if parameter.grad is not None
        ]
        flat = parameters_to_vector(gradients)
        dist.all_reduce(flat)
        vector_to_parameters(flat / self.count, gradients)

    def average(self, values: Mapping[str, float]) -> dict[str, float]:
        """The mean of each value over the processes."""
        if self.count == 1:
            return dict(values)
        flat = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(flat)
        return dict(zip(values, (flat / self.count).tolist(), strict=True))

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        """Leave the others: all at once after a run, as the first one takes the store with it.

        A process that fails leaves at once, so that the others' next exchange fails and does not
        wait. Left in the group, a process could abort: the group's threads outlive the interpreter.
        """
        if self.count == 1:
            return
        if kind is None:
            dist.barrier()
        dist.destroy_process_group()
