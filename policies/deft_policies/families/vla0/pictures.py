"""Camera frames to the pictures that the model was trained on, and on to patches.

Crop, resize and tiling are the evaluation's own; patches follow Qwen2.5-VL's processor, which
changes no size here: what it is given has the pixels that it asks for.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from deft_core.types import Image
from deft_policies.families.vla0.run_folder import RunFolder
from deft_policies.model.qwen_vision import FRAMES, MERGE, PATCH

# CLIP's mean and standard deviation, of pixels between 0 and 255.
_MEAN = torch.tensor((0.48145466, 0.4578275, 0.40821073))
_STD = torch.tensor((0.26862954, 0.26130258, 0.27577711))


def make_pictures(cameras: Sequence[Image], run: RunFolder) -> list[NDArray[np.uint8]]:
    """What the processor is given of a frame: one picture, or one of each camera."""
    views = [_view(camera, run) for camera in cameras]
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


def to_patches(pictures: Tensor) -> Tensor:
    """Of bytes [picture, row, column, channel] normalised patches [picture, patch, number].

    A patch has channel * frame * 14 * 14 numbers; four of a merged place lie together.
    """
    rows, columns = (side // (PATCH * MERGE) for side in pictures.shape[1:3])
    pixels = pictures.permute(0, 3, 1, 2).float()  # [picture, channel, row, column]
    mean, std = _normalization(pictures.device)
    normed = (pixels - mean) / std
    split = normed.view(len(pictures), 3, rows, MERGE, PATCH, columns, MERGE, PATCH)
    # [picture, place row, place column, row in it, column in it, channel, pixel row, pixel column]
    ordered = split.permute(0, 2, 5, 3, 6, 1, 4, 7)[:, :, :, :, :, :, None]
    repeated = ordered.expand(-1, -1, -1, -1, -1, -1, FRAMES, -1, -1)
    return repeated.reshape(len(pictures), rows * columns * MERGE**2, -1)


@lru_cache(maxsize=4)
def _normalization(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of bytes, [channel, 1, 1]."""
    with torch.inference_mode(False):
        mean, std = ((255 * channels)[:, None, None].to(device) for channels in (_MEAN, _STD))
        return mean, std
