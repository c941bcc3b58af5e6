"""Camera frames to the pictures that the model was trained on, and on to patches.

Crop, resize and tiling are the evaluation's own; patches follow Qwen2.5-VL's processor, which
changes no size here: what it is given has the pixels that it asks for.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from deft_client.types import Image
from deft_policies.families.vla0.run_folder import RunFolder
from deft_policies.model.qwen_vision import FRAMES, MERGE, PATCH

# CLIP's mean and standard deviation, of pixels between 0 and 255.
_MEAN = torch.tensor((0.48145466, 0.4578275, 0.40821073))
_STD = torch.tensor((0.26862954, 0.26130258, 0.27577711))


def make_pictures(cameras: Sequence[Image], run: RunFolder) -> list[NDArray[np.uint8]]:
    """What the processor is given of a frame: one picture, or one of each camera."""
    views = [_view(one, run) for one in cameras]
    if run.is_tiled:
        views = [torch.cat(views, dim=1)]
    # Cut, not rounded.
    return [view.to(torch.uint8).numpy() for view in views]


def _view(image: Image, run: RunFolder) -> Tensor:
    """One camera, [row, column, channel] in float32, cropped and brought to size."""
    height, width = image.shape[:2]
    rows, columns = int(run.crop * height), int(run.crop * width)
    top, left = round((height - rows) / 2), round((width - columns) / 2)
    cropped = image[top : top + rows, left : left + columns]
    view = torch.from_numpy(np.ascontiguousarray(cropped)).float()
    if (rows, columns) == (run.size, run.size):
        return view
    stacked = view.permute(2, 0, 1)[None]
    sized = functional.interpolate(stacked, (run.size, run.size), mode="bilinear")
    return sized[0].permute(1, 2, 0)


def to_patches(picture: NDArray[np.uint8]) -> Tensor:
    """Normalised patches [patch, channel * frame * 14 * 14], four of a merged place together."""
    rows, columns = (side // (PATCH * MERGE) for side in picture.shape[:2])
    pixels = torch.from_numpy(picture).permute(2, 0, 1).float()  # [channel, row, column]
    mean, std = (255 * _MEAN)[:, None, None], (255 * _STD)[:, None, None]
    normed = (pixels - mean) / std
    split = normed.view(3, rows, MERGE, PATCH, columns, MERGE, PATCH)
    # [place row, place column, row in it, column in it, channel, pixel row, pixel column]
    ordered = split.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    repeated = ordered.expand(-1, -1, -1, -1, -1, FRAMES, -1, -1)
    return repeated.reshape(rows * columns * MERGE**2, -1)
