"""Stores the decoder's matrices in fewer bits: fp8, and int4 on a GPU, for our own products, the
others through torchao.

The library is imported only when it is asked for: it is slow to import, and speaks on the way.
Embedding, head, norms and everything that looks at the image keep their format.

In fp8 (e4m3) each row of a matrix has a scale, a power of two. In int4 each group of a row has one,
of five bits. So bfloat16 holds every weight exactly. Only the weights have fewer bits: what they
are multiplied with keeps its format. On a GPU our own product reads both (`kernels`); elsewhere
there is a slow twin, for tests.
"""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.errors import DeviceError
from deft_policies.model.formats import Quantization

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # that the format holds
SMALLEST_ROW = 1e-12  # rows of nothing but zeros are divided by this
GROUP = 128  # inputs that share an int4 scale
_GROUP_CPU = 32
_BITS_OF_SCALE = 5
_CAPABILITY = {Quantization.FP8: (8, 9), Quantization.INT4: (8, 0)}  # of a GPU, at least


def check_quantization(
    quantization: Quantization, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise `DeviceError` if the device cannot hold or multiply such matrices."""
    if quantization is Quantization.NONE:
        return
    if not _is_ours(quantization, device):
        _import_torchao()
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"quantization works on cpu and cuda, not on {device}")
    least = _CAPABILITY.get(quantization)
    if least is None or device.type == "cpu":
        return
    name, found = quantization.value, torch.cuda.get_device_capability(device)
    if found < least:
        raise DeviceError(
            f"{name} needs compute capability {least[0]}.{least[1]}, {device} has "
            f"{found[0]}.{found[1]}; use int8 instead"
        )
    if dtype is not torch.bfloat16:
        raise DeviceError(f"{name} on a GPU goes with bfloat16 only; use --dtype bfloat16")


def quantize_linears(
    module: nn.Module, quantization: Quantization, device: torch.device
) -> list[str]:
    """Quantise the linears inside a module in place; return the names of those that stay.

    A linear stays if its sizes are not multiples of what the format groups.
    """
    if quantization is Quantization.NONE:
        return []
    linears = {
        name: linear for name, linear in module.named_modules() if isinstance(linear, nn.Linear)
    }
    if _is_ours(quantization, device):
        kind = Fp8Linear if quantization is Quantization.FP8 else Int4Linear
        for name, linear in linears.items():
            module.set_submodule(name, kind(linear))
        return []
    kept = [name for name, linear in linears.items() if not _fits(linear, quantization)]
    library = _import_torchao()
    with _quiet():
        library.quantize_(
            module,
            _config(library, quantization),
            filter_fn=lambda one, name: isinstance(one, nn.Linear) and name not in kept,
        )
    return kept


def _is_ours(quantization: Quantization, device: torch.device) -> bool:
    """Whether our own product reads the format."""
    is_int4 = quantization is Quantization.INT4 and device.type == "cuda"
    return quantization is Quantization.FP8 or is_int4


def _fits(linear: nn.Linear, quantization: Quantization) -> bool:
    return quantization is not Quantization.INT4 or linear.in_features % _GROUP_CPU == 0


def _config(library: ModuleType, quantization: Quantization) -> object:
    """The library's own description of the format."""
    if quantization is Quantization.INT8:
        return library.Int8WeightOnlyConfig(set_inductor_config=False)
    # Its packed kernels are for GPUs. This keeps each value in a byte: int4's accuracy, but
    # int8's size.
    return library.IntxWeightOnlyConfig(
        weight_dtype=torch.int4,  # type: ignore[attr-defined]  # missing from torch's stubs
        granularity=library.PerGroup(_GROUP_CPU),
    )


def _import_torchao() -> ModuleType:
    with _quiet():
        try:
            return import_module("torchao.quantization")
        except ImportError:
            raise DeviceError(
                "quantization needs torchao; in a clone of Deft, pip install '.[quantization]'"
            ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's remarks about kernels it could not load, and its own deprecations, in."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@dataclass(frozen=True)
class Matrix:
    """A weight [out, in] and a bias [out]; one in few bits has `scales`, in float32, too.

    Those of fp8 are [out], those of int4 [out, group].
    """

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None

    @property
    def bits(self) -> int:
        """Of a weight: 8 in fp8, 4 where two share a byte, 16 else."""
        if self.scales is None:
            return 16
        return 4 if self.weight.dtype is torch.uint8 else 8


class NarrowLinear(nn.Module, ABC):
    """A linear without a bias, its weight in few bits."""

    in_features: int
    out_features: int

    def __init__(self, linear: nn.Linear, values: Tensor, scales: Tensor) -> None:
        super().__init__()
        assert linear.bias is None
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)

    @property
    def matrix(self) -> Matrix:
        """For our own product."""
        return Matrix(self.get_buffer("values"), scales=self.get_buffer("scales"))

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The same in float32, [out, in]."""

    def multiply(self, inputs: Tensor) -> Tensor:
        """[row, out] of [row, in], summed in float32."""
        return functional.linear(inputs.float(), self.weight).to(inputs.dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply [..., in]."""
        return self.multiply(inputs.flatten(0, -2)).view(*inputs.shape[:-1], -1)


class Fp8Linear(NarrowLinear):
    """In fp8, with a scale for every row."""

    def __init__(self, linear: nn.Linear) -> None:
        wide = linear.weight.detach().float()
        largest = wide.abs().amax(dim=1).clamp_(min=SMALLEST_ROW).div_(LARGEST)
        scales = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
        super().__init__(linear, (wide / scales[:, None]).to(FP8), scales)

    @property
    def weight(self) -> Tensor:
        """The same in float32, [out, in]."""
        return self.get_buffer("values").float() * self.get_buffer("scales")[:, None]


class Int4Linear(NarrowLinear):
    """In whole numbers from -8 to 7, with a scale for every group of a row.

    Bytes hold the numbers of one group in their lower halves, and those of the next group in their
    upper ones. What is missing of the last two groups is filled with zeros.
    """

    def __init__(self, linear: nn.Linear) -> None:
        wide = linear.weight.detach().float()
        wide = functional.pad(wide, (0, -wide.shape[1] % (2 * GROUP)))
        wide = wide.view(len(wide), -1, GROUP)
        # The number that is farthest from zero becomes -8.
        farthest = wide.gather(2, wide.abs().argmax(dim=2, keepdim=True)).squeeze(2)
        mantissa, exponent = torch.frexp(farthest / -8)
        few = (mantissa * 2**_BITS_OF_SCALE).round_()
        scales = torch.ldexp(few, exponent - _BITS_OF_SCALE)
        divisors = torch.where(scales == 0, 1.0, scales)[:, :, None]
        numbers = (wide / divisors).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
        low, high = numbers.view(len(wide), -1, 2, GROUP).unbind(2)
        super().__init__(linear, (low | high << 4).flatten(1), scales)

    @property
    def weight(self) -> Tensor:
        """The same in float32, [out, in]."""
        both = self.get_buffer("values").view(self.out_features, -1, GROUP)
        numbers = torch.stack((both & 15, both >> 4), dim=2).flatten(1, 2).float() - 8
        wide = numbers * self.get_buffer("scales")[:, :, None]
        return wide.flatten(1)[:, : self.in_features]
