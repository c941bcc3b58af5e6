"""The LIBERO image chain said as plainly as possible: one number after the other in float32.

The twin that `deft_core.image_chain` is compared with.
"""

import ctypes
import math

import numpy as np
from numpy.typing import NDArray

F = np.float32
PI = F(3.14159265359)
SINE = ctypes.CDLL(None).sinf
SINE.restype = ctypes.c_float
SINE.argtypes = [ctypes.c_float]

Image = NDArray[np.uint8]


def resize_lanczos3(image: Image, size: int) -> Image:
    if image.shape[:2] == (size, size):
        return image
    rows = resize_first_axis(image.astype(F), size)
    columns = resize_first_axis(rows.transpose(1, 0, 2), size)
    return np.clip(np.rint(columns.transpose(1, 0, 2)), 0, 255).astype(np.uint8)


def resize_first_axis(lines: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    outputs = []
    for output in range(size):
        first, weights = lanczos_weights(len(lines), size, output)
        total = np.zeros(lines.shape[1:], F)
        for place, weight in enumerate(weights, start=first):
            total = total + weight * lines[place]
        outputs.append(total)
    return np.stack(outputs)


def lanczos_weights(length: int, size: int, output: int) -> tuple[int, list[np.float32]]:
    inverse = F(1.0 / float(F(size) / F(length)))
    stretch = max(inverse, F(1))
    centre = F(output + 0.5) * inverse
    first = max(math.ceil(centre - F(3) * stretch - F(0.5)), 0)
    last = min(math.floor(centre + F(3) * stretch - F(0.5)), length - 1)
    weights = []
    for place in range(first, last + 1):
        weights.append(lanczos((F(place) + F(0.5) - centre) * (F(1) / stretch)))
    total = F(0)
    for weight in weights:
        total = total + weight
    return first, [weight * (F(1) / total) for weight in weights]


def lanczos(offset: np.float32) -> np.float32:
    x = abs(offset)
    if x > F(3):
        return F(0)
    if x <= F(1e-3):
        return F(1)
    above = F(3) * F(SINE(float(PI * x))) * F(SINE(float(PI * x / F(3))))
    return above / (PI * PI * x * x)


def crop_centre(image: Image, size: int) -> Image:
    height, width, _ = image.shape
    scaled = image.astype(F) * F(1 / 255)
    cropped = np.empty((size, size, 3), np.uint8)
    for row, (top, bottom, down) in enumerate(crop_places(height, size)):
        for column, (left, right, across) in enumerate(crop_places(width, size)):
            upper = scaled[top, left] + (scaled[top, right] - scaled[top, left]) * across
            lower = scaled[bottom, left] + (scaled[bottom, right] - scaled[bottom, left]) * across
            blend = np.clip(upper + (lower - upper) * down, F(0), F(1))
            cropped[row, column] = (blend * F(255.5)).astype(np.uint8)
    return cropped


def crop_places(length: int, size: int) -> list[tuple[int, int, np.float32]]:
    """The two inputs that each output lies between, and how far it is from the first."""
    side = F(math.sqrt(F(0.9)))
    start = (F(1) - side) / F(2)
    step = (start + side - start) * F(length - 1) / F(size - 1)
    places = [start * F(length - 1) + F(output) * step for output in range(size)]
    return [(math.floor(at), math.ceil(at), at - F(math.floor(at))) for at in places]
