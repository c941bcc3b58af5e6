"""What this device can do at best, measured: copying and multiplying."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_GPU_COPY_BYTES = 1 << 31
_CPU_COPY_BYTES = 1 << 27
_GPU_SIDE = 8192
_CPU_SIDE = 1024
_ROUNDS = 5


@dataclass(frozen=True)
class DeviceRates:
    """Best of a few rounds; bytes count both what a copy reads and what it writes."""

    bytes_per_s: float
    flops_per_s: float
    description: str


def measure_rates(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """Measure copy bandwidth and the rate of a large matrix product in this number format."""
    is_cuda = device.type == "cuda"
    num_bytes = _GPU_COPY_BYTES if is_cuda else _CPU_COPY_BYTES
    side = _GPU_SIDE if is_cuda else _CPU_SIDE
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copied_s = _best_s(lambda: target.copy_(source), device)
    first = torch.ones(side, side, device=device, dtype=dtype)
    second = torch.ones_like(first)
    multiplied_s = _best_s(lambda: first @ second, device)
    return DeviceRates(2 * num_bytes / copied_s, 2 * side**3 / multiplied_s, describe(device))


def describe(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_ROUNDS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
