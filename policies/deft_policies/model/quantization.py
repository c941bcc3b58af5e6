"""Stores the decoder's matrices in fewer bits: fp8 by PyTorch itself, the others through torchao.

The library is imported only when it is asked for: it is slow to import, and speaks on the way.
Embedding, head, norms and everything that looks at the image keep their format.

In fp8 (e4m3) each row of a matrix has a scale, a power of two: so bfloat16 holds every weight
exactly. Only the weights have fewer bits: what they are multiplied with keeps its format, and a
token has the bits alone that it has among others. On a GPU our own product reads fp8 (`kernels`);
elsewhere there is a slow twin, for tests.
"""

import logging
import warnings
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
_GROUP = 32  # inputs that share an int4 scale on a CPU
_GROUP_CUDA = 128
_CAPABILITY = {Quantization.FP8: (8, 9), Quantization.INT4: (8, 0)}  # of a GPU, at least


def check_quantization(
    quantization: Quantization, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise `DeviceError` if the device cannot hold or multiply such matrices."""
    if quantization is Quantization.NONE:
        return
    if quantization is not Quantization.FP8:
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
    kept = [name for name, linear in linears.items() if not _fits(linear, quantization, device)]
    if quantization is Quantization.FP8:
        for name, linear in linears.items():
            if name not in kept:
                module.set_submodule(name, Fp8Linear(linear))
        return kept
    library = _import_torchao()
    with _quiet():
        library.quantize_(
            module,
            _config(library, quantization, device),
            filter_fn=lambda one, name: isinstance(one, nn.Linear) and name not in kept,
        )
    return kept


def _fits(linear: nn.Linear, quantization: Quantization, device: torch.device) -> bool:
    if quantization is Quantization.INT4:
        return linear.in_features % (_GROUP if device.type == "cpu" else _GROUP_CUDA) == 0
    return True


def _config(library: ModuleType, quantization: Quantization, device: torch.device) -> object:
    """The library's own description of the format."""
    if quantization is Quantization.INT8:
        return library.Int8WeightOnlyConfig(set_inductor_config=False)
    if device.type == "cuda":
        return library.Int4WeightOnlyConfig(
            group_size=_GROUP_CUDA,
            int4_packing_format="tile_packed_to_4d",
            set_inductor_config=False,
        )
    # The packed kernels are for GPUs. This keeps each value in a byte: int4's accuracy, but
    # int8's size.
    return library.IntxWeightOnlyConfig(
        weight_dtype=torch.int4,  # type: ignore[attr-defined]  # missing from torch's stubs
        granularity=library.PerGroup(_GROUP),
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
    """A weight [out, in] and a bias [out]; one in fp8 has `scales` [out], in float32, too."""

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None


class Fp8Linear(nn.Module):
    """A linear without a bias, its weight in fp8 with a scale for every row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        assert linear.bias is None
        self.in_features, self.out_features = linear.in_features, linear.out_features
        wide = linear.weight.detach().float()
        largest = wide.abs().amax(dim=1).clamp_(min=SMALLEST_ROW).div_(LARGEST)
        scales = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
        self.register_buffer("values", (wide / scales[:, None]).to(FP8))
        self.register_buffer("scales", scales)

    @property
    def matrix(self) -> Matrix:
        """For our own product."""
        return Matrix(self.get_buffer("values"), scales=self.get_buffer("scales"))

    def multiply(self, inputs: Tensor) -> Tensor:
        """[row, out] of [row, in], summed in float32."""
        sums = functional.linear(inputs.float(), self.get_buffer("values").float())
        return sums.mul_(self.get_buffer("scales")).to(inputs.dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply [..., in]."""
        return self.multiply(inputs.flatten(0, -2)).view(*inputs.shape[:-1], -1)
