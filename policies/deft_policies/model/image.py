"""Camera frame to pixel values, equal to the checkpoint's own processor bit for bit.

What comes out of the resize is uint8, so normalising is a table of 256 values per channel: exact
on any device, and only the bytes need to travel there.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as PillowImage
from torch import Tensor

from deft_client.image_chain import ImageChain
from deft_client.types import Image
from deft_policies.model.sizes import ImageProcessorConfig, ResizeStrategy
from deft_policies.model.staging import to_device


class ImageProcessor:
    """Turns observations' images into the input of the vision towers."""

    def __init__(self, config: ImageProcessorConfig, chain: ImageChain) -> None:
        self._config = config
        self.chain = chain  # what is done to a frame before the checkpoint's own resize
        self._table = lru_cache(maxsize=4)(self._build_table)  # only the first frame pays

    def fit(self, image: Image) -> Image:
        """Bring a frame to the towers' size, uint8 [size, size, 3]."""
        return resize_like_processor(self.chain.apply(image, self._config.size), self._config)

    def pixel_values(
        self,
        fitted: Sequence[Image],
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Normalise fitted frames on a device: [row, 3 * tower, size, size].

        The towers' channels stand side by side, in the towers' order.
        """
        frames = to_device(np.stack(fitted), device)
        table = self._table(frames.device, dtype).view(1, -1, 3, 256)
        rows, height, width, _ = frames.shape
        codes = frames.permute(0, 3, 1, 2).reshape(rows, 1, 3, -1).long()
        towers = table.shape[1]
        values = table.expand(rows, -1, -1, -1).gather(3, codes.expand(-1, towers, -1, -1))
        return values.view(rows, 3 * towers, height, width)

    def _build_table(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(build_normalization_table(self._config)).to(device, dtype)


def build_normalization_table(config: ImageProcessorConfig) -> NDArray[np.float32]:
    """The float32 value of every byte, [3 * tower, 256]: (byte / 255 - mean) / std."""
    scaled = np.arange(256, dtype=np.float32) / np.float32(255)
    means, stds = np.array(config.normalizations, np.float32).swapaxes(0, 1).reshape(2, -1, 1)
    return (scaled - means) / stds


def resize_like_processor(image: Image, config: ImageProcessorConfig) -> Image:
    """Resize with Pillow's bicubic filter, by the processor's strategy, to a square."""
    size = config.size
    if image.shape[:2] == (size, size):
        return image
    picture = PillowImage.fromarray(image)
    if config.resize is ResizeStrategy.LETTERBOX:
        picture = _pad_to_square(picture, config.letterbox_fill)
    picture = picture.resize(_target_size(picture, config), PillowImage.Resampling.BICUBIC)
    # Rounded halves to even, as in torchvision's centre crop.
    left, top = round((picture.width - size) / 2), round((picture.height - size) / 2)
    return np.array(picture.crop((left, top, left + size, top + size)))


def _pad_to_square(picture: PillowImage.Image, fill: tuple[int, ...]) -> PillowImage.Image:
    """Put the frame in the middle of a square; an odd rest stays missing, as in the original."""
    longer = max(picture.size)
    across, down = (longer - picture.width) // 2, (longer - picture.height) // 2
    square = PillowImage.new("RGB", (picture.width + 2 * across, picture.height + 2 * down), fill)
    square.paste(picture, (across, down))
    return square


def _target_size(picture: PillowImage.Image, config: ImageProcessorConfig) -> tuple[int, int]:
    if config.is_stretched:
        return config.size, config.size
    shorter, longer = sorted(picture.size)
    long_side = int(config.size * longer / shorter)
    if picture.width <= picture.height:
        return config.size, long_side
    return long_side, config.size
