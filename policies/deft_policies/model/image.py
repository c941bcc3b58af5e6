"""Camera frame to pixel values, equal to the checkpoint's own processor bit for bit.

What comes out of the resize is uint8, so normalising is a table of 256 values per channel: exact
on any device, and only the bytes need to travel there. A GPU resizes frames itself, to the bytes
that Pillow makes on a CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as PillowImage
from torch import Tensor
from torch.nn import functional

from deft_core.image_chain import ImageChain
from deft_core.types import Image
from deft_policies.model.bicubic import BICUBIC, MOST_SHRUNK, resize_bicubic
from deft_policies.model.sizes import ImageProcessorConfig, ResizeStrategy
from deft_policies.model.staging import to_device


class ImageProcessor:
    """Turns observations' images into the input of the vision towers."""

    def __init__(
        self, config: ImageProcessorConfig, chain: ImageChain, resizes_on_device: bool = False
    ) -> None:
        """Where it `resizes_on_device`, frames are fitted when their pixel values are asked for."""
        self._config = config
        self.chain = chain  # what is done to a frame before the checkpoint's own resize
        self._resizes_on_device = resizes_on_device
        self._table = lru_cache(maxsize=4)(self._build_table)  # only the first frame pays

    def fit(self, image: Image) -> Image:
        """What of a frame's way to the towers' size is the host's: uint8 [height, width, 3]."""
        size = self._config.size
        image = self.chain.apply(image, size)
        if self._resizes_on_device and max(image.shape[:2]) <= MOST_SHRUNK * size:
            return image
        return resize_like_processor(image, self._config)

    def pixel_values(
        self,
        fitted: Sequence[Image],
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Normalise fitted frames on a device: [row, 3 * tower, size, size].

        The towers' channels lie side by side, in the towers' order.
        """
        codes = self._codes(fitted, device)
        table = self._table(codes.device, dtype).view(1, -1, 3, 256)
        rows, _, height, width = codes.shape
        towers = table.shape[1]
        by_tower = codes.reshape(rows, 1, 3, -1).expand(-1, towers, -1, -1)
        values = table.expand(rows, -1, -1, -1).gather(3, by_tower)
        return values.view(rows, 3 * towers, height, width)

    def _codes(self, fitted: Sequence[Image], device: torch.device | None) -> Tensor:
        """The bytes of frames at the towers' size, int64 [row, channel, size, size]."""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for index, image in enumerate(fitted):
            by_shape.setdefault(image.shape, []).append(index)
        parts = []
        for group in by_shape.values():
            frames = to_device(np.stack([fitted[index] for index in group]), device)
            frames = frames.permute(0, 3, 1, 2)
            if frames.shape[2:] != (self._config.size,) * 2:
                frames = resize_on_device(frames, self._config)
            parts.append(frames.long())
        if len(parts) == 1:
            return parts[0]
        order = [index for group in by_shape.values() for index in group]
        inverse = to_device(np.argsort(order).tolist(), parts[0].device)
        return torch.cat(parts).index_select(0, inverse)

    def _build_table(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(build_normalization_table(self._config)).to(device, dtype)


def build_normalization_table(config: ImageProcessorConfig) -> NDArray[np.float32]:
    """The float32 value of every byte, [3 * tower, 256]: (byte / 255 - mean) / std."""
    scaled = np.arange(256, dtype=np.float32) / np.float32(255)
    means, stds = np.array(config.normalizations, np.float32).swapaxes(0, 1).reshape(2, -1, 1)
    return (scaled - means) / stds


@dataclass(frozen=True)
class _Way:
    """How a frame comes to the towers' size."""

    down: int  # rows of the fill colour above it, and as many below
    across: int  # columns to its left, and as many to its right
    size: tuple[int, int]  # height and width that it is resized to
    top: int  # what of that is kept begins here
    left: int


def _find_way(height: int, width: int, config: ImageProcessorConfig) -> _Way:
    down = across = 0
    if config.resize is ResizeStrategy.LETTERBOX:
        # In the middle of a square; an odd rest stays missing, as in the original.
        longer = max(height, width)
        down, across = (longer - height) // 2, (longer - width) // 2
        height, width = height + 2 * down, width + 2 * across
    rows = columns = config.size
    if not config.is_stretched:
        long_side = int(config.size * max(height, width) / min(height, width))
        rows, columns = (long_side, columns) if width <= height else (rows, long_side)
    # Rounded halves to even, as in torchvision's centre crop.
    top, left = round((rows - config.size) / 2), round((columns - config.size) / 2)
    return _Way(down, across, (rows, columns), top, left)


def resize_like_processor(image: Image, config: ImageProcessorConfig) -> Image:
    """Resize with Pillow's bicubic filter, by the processor's strategy, to a square."""
    size = config.size
    if image.shape[:2] == (size, size):
        return image
    height, width, _ = image.shape
    way, picture = _find_way(height, width, config), PillowImage.fromarray(image)
    if way.down or way.across:
        whole = width + 2 * way.across, height + 2 * way.down
        square = PillowImage.new("RGB", whole, config.letterbox_fill)
        square.paste(picture, (way.across, way.down))
        picture = square
    picture = picture.resize(way.size[::-1], BICUBIC)
    return np.array(picture.crop((way.left, way.top, way.left + size, way.top + size)))


def resize_on_device(frames: Tensor, config: ImageProcessorConfig) -> Tensor:
    """The same of bytes [row, channel, height, width] on any device, in float32."""
    height, width = frames.shape[2:]
    way = _find_way(height, width, config)
    wide = frames.to(torch.float32, memory_format=torch.contiguous_format)
    if way.down or way.across:
        fill = [float(share) for share in config.letterbox_fill]
        channels = [
            functional.pad(wide[:, index], (way.across, way.across, way.down, way.down), value=one)
            for index, one in enumerate(fill)
        ]
        wide = torch.stack(channels, dim=1)
    crop = range(way.top, way.top + config.size), range(way.left, way.left + config.size)
    return resize_bicubic(wide, way.size, crop)
