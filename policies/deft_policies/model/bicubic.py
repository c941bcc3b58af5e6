"""Pillow's bicubic resize on any device, byte for byte.

Pillow resizes bytes with whole numbers: weights are multiples of 2^-22, and the bytes between the
two directions are rounded and clipped. Here each direction is one product in float32 that is exact
in any order: a weight is split into two parts of some eleven bits, so no sum needs more than 24.
"""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as PillowImage
from torch import Tensor

BICUBIC = PillowImage.Resampling.BICUBIC
_SUPPORT = 2.0  # inputs to each side that a weight reaches, where nothing shrinks
_SHARPNESS = -0.5  # of the cubic
_HIGH, _LOW = 1 << 10, 1 << 12  # a weight is a number of parts of 1 / _HIGH, and of parts of those
_WHOLE = _HIGH * _LOW  # weights are multiples of 2^-22
_TRIES = 32  # at finding a frame that tells one direction from the other
_MOST_NUMBERS = 1 << 24  # of the frames that are resized together
MOST_SHRUNK = 16  # times: beyond that, sums of many inputs might need more bits


def resize_bicubic(frames: Tensor, size: tuple[int, int], crop: tuple[range, range]) -> Tensor:
    """Resize bytes [row, channel, height, width] to a `size`, of which the `crop` is computed.

    Takes and returns whole numbers in float32. Size and crop are of height and width; no side may
    be more than `MOST_SHRUNK` times as long as its size.
    """
    num_rows, num_channels, height, width = frames.shape
    at_once = max(1, _MOST_NUMBERS // (num_channels * height * width))
    parts = [_resize(part, size, crop) for part in torch.split(frames, at_once)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _resize(frames: Tensor, size: tuple[int, int], crop: tuple[range, range]) -> Tensor:
    height, width = frames.shape[2:]
    if goes_down_first((height, width), size):
        return _across(_down(frames, size[0], crop[0]), size[1], crop[1])
    return _down(_across(frames, size[1], crop[1]), size[0], crop[0])


def _across(frames: Tensor, size: int, outputs: range) -> Tensor:
    *shape, width = frames.shape
    if width == size:
        return frames[:, :, :, outputs.start : outputs.stop]
    weights, bias = _weights(width, size, outputs, frames.device)
    sums = torch.addmm(bias, frames.reshape(-1, width), weights.t())
    return _rounded(sums.view(*shape, -1), 3)


def _down(frames: Tensor, size: int, outputs: range) -> Tensor:
    height = frames.shape[2]
    if height == size:
        return frames[:, :, outputs.start : outputs.stop]
    weights, bias = _weights(height, size, outputs, frames.device)
    columns = frames.flatten(0, 1)
    sums = torch.baddbmm(bias[:, None], weights.expand(len(columns), -1, -1), columns)
    return _rounded(sums.view(*frames.shape[:2], *sums.shape[1:]), 2)


@lru_cache(maxsize=64)
def goes_down_first(shape: tuple[int, int], size: tuple[int, int]) -> bool:
    """Whether Pillow resizes down before across, from and to these heights and widths.

    Pillow is asked: which direction comes first depends on its version and on all four sides.
    """
    height, width = size
    numbers = np.random.default_rng(0)
    for _ in range(_TRIES):  # of small frames both directions may come to the same
        noise = numbers.integers(0, 256, (*shape, 3), dtype=np.uint8)
        picture = PillowImage.fromarray(noise)
        across_first = picture.resize((width, shape[0]), BICUBIC).resize((width, height), BICUBIC)
        down_first = picture.resize((shape[1], height), BICUBIC).resize((width, height), BICUBIC)
        if across_first.tobytes() != down_first.tobytes():
            return picture.resize((width, height), BICUBIC).tobytes() == down_first.tobytes()
    return False


def _rounded(sums: Tensor, axis: int) -> Tensor:
    """The bytes that sums encode: sums of the weights' high parts, and then of their low ones.

    The low ones have half a byte added to them; what is behind the point is cut off.
    """
    high, low = sums.chunk(2, dim=axis)
    return torch.add(high, low.floor(), alpha=1 / _HIGH).clamp_(0, 255).floor_()


@lru_cache(maxsize=32)
def _weights(length: int, size: int, outputs: range, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both parts of the weights of some outputs, [part of output, input], and what is added."""
    matrix = np.zeros((size, length), np.int64)
    for output, (first, weights) in enumerate(pillow_weights(length, size)):
        matrix[output, first : first + len(weights)] = weights
    matrix = matrix[outputs.start : outputs.stop]
    high = (matrix + _LOW // 2) // _LOW
    low = matrix - high * _LOW
    # A product in the format TF32 keeps eleven bits, where TF32 is switched on.
    assert max(np.abs(high).max(), np.abs(low).max()) <= 1 << 11
    assert all(np.maximum(part, 0).sum(axis=1).max() * 255 < 1 << 24 for part in (low, -low))
    parts = np.concatenate((high / _HIGH, low / _LOW)).astype(np.float32)
    bias = np.repeat(np.array((0, _HIGH / 2), np.float32), len(outputs))
    with torch.inference_mode(False):
        return torch.from_numpy(parts).to(device), torch.from_numpy(bias).to(device)


def pillow_weights(length: int, size: int) -> list[tuple[int, NDArray[np.int64]]]:
    """For each output the first of its inputs and their weights, in parts of 2^-22."""
    scale = length / size
    stretch = max(scale, 1.0)
    support, weights_by_output = _SUPPORT * stretch, []
    for output in range(size):
        centre = (output + 0.5) * scale
        first = max(int(centre - support + 0.5), 0)
        stop = min(int(centre + support + 0.5), length)
        weights = [_cubic((place - centre + 0.5) * (1.0 / stretch)) for place in range(first, stop)]
        total = 0.0
        for weight in weights:  # one after the other
            total += weight
        scaled = [weight / total * _WHOLE for weight in weights]
        whole = [int(weight - 0.5) if weight < 0 else int(weight + 0.5) for weight in scaled]
        weights_by_output.append((first, np.array(whole, np.int64)))
    return weights_by_output


def _cubic(distance: float) -> float:
    """The weight of an input, in Pillow's order of operations."""
    x, a = abs(distance), _SHARPNESS
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    if x < 2.0:
        return (((x - 5) * x + 8) * x - 4) * a
    return 0.0
