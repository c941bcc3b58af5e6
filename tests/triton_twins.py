"""Fused kernels under Triton's interpreter (see `conftest.py`): the same programs, on a CPU."""

from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from deft_policies.model.kernels.launch import Arguments, Constants, FusedKernels, Grid, start


class Counted:
    """Starts programs and remembers which; where they are only counted, it starts none."""

    def __init__(self, is_run: bool = True) -> None:
        self.launched: list[str] = []
        self.is_run = is_run

    def __call__(self, kernel: Any, grid: Grid, arguments: Arguments, constants: Constants) -> None:
        self.launched.append(kernel.fn.__name__)
        if not self.is_run:
            return
        with _disable_current_modes():  # the interpreter's own operations are no launches
            start(kernel, grid, arguments, constants)

    @property
    def kernels(self) -> FusedKernels:
        """The fused operations, started here."""
        return FusedKernels(self)
