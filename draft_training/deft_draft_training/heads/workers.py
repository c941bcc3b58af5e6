"""Several training processes as one: who takes which samples, and how gradients become one."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from deft_draft_training.errors import ConfigError


@dataclass(frozen=True)
class Workers:
    """This process among the others."""

    rank: int
    count: int
    device: str = "cpu"  # on which they exchange numbers

    @staticmethod
    def alone() -> "Workers":
        """A run of one process."""
        return Workers(0, 1)

    @staticmethod
    def from_torchrun() -> "Workers":
        """Join the processes that torchrun started; alone if it started none."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            return Workers.alone()
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
        gradients = [one.grad for one in module.parameters() if one.grad is not None]
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the others: all at once after a run, as the first one takes the store with it.

        Whoever fails leaves at once, so that the others' next exchange fails instead of waiting.
        Left in the group, a process could abort: the group's threads outlive the interpreter.
        """
        if self.count == 1:
            return
        if kind is None:
            dist.barrier()
        dist.destroy_process_group()
