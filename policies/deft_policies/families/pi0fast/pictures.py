"""Camera frames to what the tower is given, as LeRobot makes it: float32 all the way.

Nothing is rounded to bytes in between, and shrinking does not smooth.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deft_core.types import Image

SIDE = 224


def to_pixels(image: Image) -> Tensor:
    """[3, 224, 224], -1 to 1; what the frame's ratio leaves free is -1, the odd row below."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255.0
    height, width = pixels.shape[1:]
    if (height, width) != (SIDE, SIDE):
        ratio = max(width / SIDE, height / SIDE)
        rows, columns = max(int(height / ratio), 1), max(int(width / ratio), 1)
        sized = functional.interpolate(
            pixels[None], (rows, columns), mode="bilinear", align_corners=False
        )
        top, left = (SIDE - rows) // 2, (SIDE - columns) // 2
        edges = (left, SIDE - columns - left, top, SIDE - rows - top)
        pixels = functional.pad(sized[0].clamp(0.0, 1.0), edges)
    return pixels * 2.0 - 1.0
