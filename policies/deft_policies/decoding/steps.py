"""How a pass of fixed shape is run: at once, or recorded the first time and replayed after.

A step is a function of tensors only, so that recording it means something. The eager runner is
the twin that every recorded one is compared with.
"""

from collections.abc import Callable, Hashable
from typing import Protocol

from torch import Tensor

Tensors = tuple[Tensor, ...]
Step = Callable[..., Tensors]


class StepRunner(Protocol):
    """Runs steps. `key` names the step and every shape and number baked into it."""

    @property
    def has_fixed_shapes(self) -> bool:
        """True if few distinct keys are wanted: callers then round lengths up to buckets."""

    def run(self, key: Hashable, step: Step, inputs: Tensors) -> Tensors:
        """Return what `step(*inputs)` returns; valid until the same key runs again."""

    def forget(self) -> None:
        """Drop what was recorded, because memory it points to is gone."""


class EagerRunner:
    """Calls the step."""

    has_fixed_shapes = False

    def run(self, key: Hashable, step: Step, inputs: Tensors) -> Tensors:
        """Call it."""
        return step(*inputs)

    def forget(self) -> None:
        """Nothing was recorded."""
