"""An exponential moving average of weights: a steadier model than the last step's own."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class WeightAverage:
    """Follows a module's parameters; decay 0 keeps nothing and costs nothing.

    Early on the average follows faster, (1 + n) / (10 + n), so that it forgets the random start.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay = decay
        self._steps = 0
        kept = module.named_parameters() if decay else iter(())
        self._weights = {name: one.detach().clone() for name, one in kept}

    @torch.no_grad()
    def follow(self, module: nn.Module) -> None:
        """Take one step towards the module's weights."""
        if not self._weights:
            return
        decay = min(self._decay, (1 + self._steps) / (10 + self._steps))
        self._steps += 1
        current = dict(module.named_parameters())
        names = list(self._weights)
        torch._foreach_lerp_(
            [self._weights[name] for name in names],
            [current[name].detach() for name in names],
            1 - decay,
        )

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """Replace the module's weights by their average, if one was kept."""
        for name, parameter in module.named_parameters():
            if name in self._weights:
                parameter.copy_(self._weights[name])

    def state(self) -> dict[str, Tensor]:
        """All there is to store."""
        if not self._weights:
            return {}
        return {**self._weights, "num_steps": torch.tensor(self._steps)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a stored state; an empty one is a fresh start."""
        if state and self._weights:
            self._steps = int(state["num_steps"])
            for name, weight in self._weights.items():
                weight.copy_(state[name])
