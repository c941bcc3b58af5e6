"""Fused kernels under Triton's interpreter (see `conftest.py`): the same programs, on a CPU."""

from typing import Any

from deft_policies.model.kernels.launch import FusedKernels, Grid, start


class Counted:
    """Starts programs and remembers which."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def __call__(self, kernel: Any, grid: Grid, *arguments: object, **constants: object) -> None:
        self.launched.append(kernel.fn.__name__)
        start(kernel, grid, *arguments, **constants)

    @property
    def kernels(self) -> FusedKernels:
        """The fused operations, started here."""
        return FusedKernels(self)
