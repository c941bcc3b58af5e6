"""Matrices in fp8 (e4m3), and what they are multiplied with: every row has a scale of its own.

The product is PyTorch's own `_scaled_mm`, which runs on a CPU too, slowly. Nothing here needs
Triton; where that is, the norm before a matrix quantises in the same launch (`launch`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # that the format holds
SMALLEST_ROW = 1e-12  # rows of nothing but zeros are divided by this


@dataclass(frozen=True)
class Fp8Rows:
    """Rows whose largest value is the largest of the format, and what to multiply them by."""

    values: Tensor  # [row, column] e4m3
    scales: Tensor  # [row, 1] float32

    @staticmethod
    def of(wide: Tensor) -> "Fp8Rows":
        """Quantise [row, column]: the slow, plain twin of what the fused kernels do."""
        rows = wide.float()
        scales = rows.abs().amax(dim=1, keepdim=True).clamp_(min=SMALLEST_ROW).div_(LARGEST)
        return Fp8Rows((rows / scales).to(FP8), scales)

    @staticmethod
    def like(wide: Tensor, width: int) -> "Fp8Rows":
        """Room for as many rows as `wide` has."""
        values = torch.empty(len(wide), width, dtype=FP8, device=wide.device)
        return Fp8Rows(values, torch.empty(len(wide), 1, device=wide.device))


class Fp8Linear(nn.Module):
    """A linear without a bias, its weight quantised row by row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        assert linear.bias is None
        self.yields: torch.dtype = linear.weight.dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        rows = Fp8Rows.of(linear.weight.detach())
        self.register_buffer("values", rows.values)
        self.register_buffer("scales", rows.scales.t().contiguous())

    def multiply(self, inputs: Fp8Rows) -> Tensor:
        """[row, out], in the format that the weight had."""
        values, scales = self.get_buffer("values"), self.get_buffer("scales")
        return torch._scaled_mm(
            inputs.values, values.t(), inputs.scales, scales, out_dtype=self.yields
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply [..., in]."""
        product = self.multiply(Fp8Rows.of(inputs.flatten(0, -2)))
        return product.view(*inputs.shape[:-1], -1)
