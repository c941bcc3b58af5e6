"""Optimisers and learning-rate schedules. Knows parameters, nothing of what they belong to."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class TrainingPrecision(Enum):
    """Of a step's matrix products."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@contextmanager
def computing_in(precision: TrainingPrecision, device: torch.device) -> Iterator[None]:
    """Compute a forward pass and its loss so; sums and losses stay float32 either way."""
    is_half = precision is TrainingPrecision.BFLOAT16
    # On a CPU, going back through fused attention takes longer in bfloat16 than all the rest.
    is_slow = is_half and device.type == "cpu"
    with (
        torch.autocast(device.type, torch.bfloat16, enabled=is_half),
        sdpa_kernel(SDPBackend.MATH) if is_slow else nullcontext(),
    ):
        yield


class WeightAverage:
    """Follows a module's parameters; decay 0 keeps nothing and costs nothing.

    Early on the average follows faster, (1 + n) / (10 + n), so that it forgets the random start.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay = decay
        self._steps = 0
        averaged = module.named_parameters() if decay else iter(())
        self._weights = {name: weight.detach().clone() for name, weight in averaged}

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


# Coefficients of the quintic Newton-Schulz iteration: they drive every singular value towards 1
# in five sweeps, without the cost of a singular value decomposition.
_QUINTIC, _SWEEPS = (3.4445, -4.7750, 2.0315), 5


@dataclass(frozen=True)
class OptimizerConfig:
    """Rates and decay. `muon_rate` 0 trains everything with AdamW."""

    rate: float = 5e-5
    muon_rate: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5
    warm_up_steps: int = 2000
    final_fraction: float = 0.0  # of the peak rate, reached at the last step
    decay_from: float = 0.0  # fraction of the run after which the rate starts to fall


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix updates are orthogonalised. For 2-D weights only."""

    def __init__(self, weights: Iterable[Tensor], rate: float, decay: float = 0.0) -> None:
        super().__init__(list(weights), {"lr": rate, "momentum": 0.95, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient; those of one shape are computed together."""
        for group in self.param_groups:
            moved = [weight for weight in group["params"] if weight.grad is not None]
            for rows, columns in {tuple(weight.shape) for weight in moved}:
                weights = [weight for weight in moved if weight.shape == (rows, columns)]
                smoothed = [
                    self._smooth(weight, weight.grad, group["momentum"]) for weight in weights
                ]
                updates = orthogonalise(torch.stack(smoothed)).to(weights[0].dtype)
                # A tall matrix moves as far per entry as a square one.
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                torch._foreach_mul_(weights, 1 - group["lr"] * group["decay"])
                torch._foreach_add_(weights, list(updates), alpha=-rate)

    def _smooth(self, weight: Tensor, gradient: Tensor, momentum: float) -> Tensor:
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        buffer: Tensor = state["momentum"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, [..., row, column]: singular values of 0.7 to 1.2."""
    a, b, c = _QUINTIC
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if torch.is_autocast_enabled(x.device.type):  # once, where autocast would in every product
        x = x.to(torch.get_autocast_dtype(x.device.type))
    for _ in range(_SWEEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def build_optimizers(module: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices when it is asked for, AdamW for all the rest."""
    trained = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
    hidden = [weight for name, weight in trained if config.muon_rate and _is_hidden(name, weight)]
    chosen = {id(weight) for weight in hidden}
    rest = [weight for _, weight in trained if id(weight) not in chosen]
    first, second = config.betas
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            rest, lr=config.rate, betas=(first, second), weight_decay=config.weight_decay
        )
    ]
    if hidden:
        optimizers.append(Muon(hidden, config.muon_rate, decay=config.weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def _is_hidden(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and "embed" not in name and "head" not in name


def update(
    module: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    config: OptimizerConfig,
    fraction: float,
) -> float:
    """Take a step with the module's gradients at a fraction of the peak rates, and drop them.

    Gradients are scaled so that their joint norm is at most `clip`; returns the norm before.
    """
    norm = float(nn.utils.clip_grad_norm_(module.parameters(), config.clip or math.inf))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * fraction
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm


def rate_fraction(config: OptimizerConfig, step: int, steps: int) -> float:
    """Linear warm-up, a plateau, then a linear fall to `final_fraction`.

    A run that would end while it warms up warms up for a tenth of its steps.
    """
    warm_up_steps = config.warm_up_steps if steps > config.warm_up_steps else steps // 10
    warm = min(1.0, (step + 1) / max(1, warm_up_steps))
    start = config.decay_from * steps
    if step <= start or math.isclose(start, steps):
        return warm
    fall = (step - start) / max(1.0, steps - start)
    return warm * (1.0 - (1.0 - config.final_fraction) * min(1.0, fall))
