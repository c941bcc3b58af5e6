"""Says before loading whether a model fits: what it needs, and what is free."""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from deft_policies.errors import DeviceError
from deft_policies.model.formats import Quantization
from deft_policies.model.tensor_names import TensorPlace

_GIB = 1024**3
# Activations, key/value cache and what the libraries take beside the weights.
_WORKING_SHARE = 0.05
_WORKING_BYTES = 256 * 1024**2
_MATRIX_BITS = {Quantization.INT8: 8, Quantization.INT4: 5, Quantization.FP8: 8}  # with scales
_MATRIX_BITS_CPU = {**_MATRIX_BITS, Quantization.INT4: 9}  # there int4 is kept in bytes


def weight_bytes(
    places: Sequence[TensorPlace],
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization = Quantization.NONE,
) -> int:
    """What the weights of a model with these tensors take on its device."""
    quantized_bits = _MATRIX_BITS_CPU if device.type == "cpu" else _MATRIX_BITS
    total_bits = 0
    for place in places:
        if place.parameter is None:
            continue
        is_matrix = ".layers." in place.parameter and len(place.shape) == 2
        bits = quantized_bits.get(quantization, 0) if is_matrix else 0
        total_bits += math.prod(place.shape) * (bits or 8 * dtype.itemsize)
    return total_bits // 8


def check_memory(
    places: Sequence[TensorPlace],
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization,
) -> int:
    """What such a model needs: weights, the largest tensor on its way there, and room to work.

    Raises `DeviceError` if the device has less; where it cannot say, nothing is refused.
    """
    weights = weight_bytes(places, device, dtype, quantization)
    used = [place for place in places if place.parameter is not None]
    largest = max(math.prod(place.shape) for place in used) * dtype.itemsize
    need = weights + largest + max(_WORKING_BYTES, int(_WORKING_SHARE * weights))
    free = find_free_bytes(device)
    if free is not None and need > free:
        raise DeviceError(
            f"the model needs about {need / _GIB:.1f} GiB on {device}, "
            f"{free / _GIB:.1f} GiB are free; use bfloat16 or a quantization, or a larger device"
        )
    return need


def find_free_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken, or None where it cannot be known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    if device.type != "cpu":
        return None
    known = [bytes_ for bytes_ in (_free_of_machine(), _free_of_container()) if bytes_ is not None]
    return min(known, default=None)


def _free_of_machine() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _free_of_container() -> int | None:
    """What the control group may still take; pages of files it has read can be given up."""
    directory = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int((directory / "memory.max").read_text())
        used = int((directory / "memory.current").read_text())
        lines = (directory / "memory.stat").read_text().splitlines()
        statistics = dict(line.split()[:2] for line in lines)
        return limit - used + int(statistics["inactive_file"])
    return None
