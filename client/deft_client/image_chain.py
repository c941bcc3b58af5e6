"""What OpenVLA's LIBERO evaluation does to a frame before the model sees it, bit for bit.

Fine-tunes were trained on frames that had been through JPEG and TensorFlow's resize, and they
notice the difference: PIL's or OpenCV's version of the same steps moves most pixels. So the steps
here repeat TensorFlow's float32 arithmetic operation by operation. Knows nothing of models; frames
are upright (the simulator's 180 degree turn belongs to the caller).

Either the robot or the server runs the chain, never both: which one is an explicit option.
"""

import io
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage

from deft_client.image_lanczos import Columns, Floats, as_pixels, resize_to_columns
from deft_client.types import Image

CROP_AREA = 0.9  # share of the frame that training with random crops leaves visible
JPEG_QUALITY = 95
MODEL_SIZE = 224

_F32 = np.float32
# Lines blended at a time: few enough for the processor's cache, enough to hide the calls.
_BLOCK_LINES = 16


class ImageChain(Enum):
    """What happens to a frame before the checkpoint's own processor resizes it."""

    NONE = "none"
    LIBERO = "libero"
    LIBERO_UNCROPPED = "libero-uncropped"  # for fine-tunes without image augmentation

    def apply(self, image: Image, size: int = MODEL_SIZE) -> Image:
        """Return the frame as the processor is to get it; `NONE` returns it unchanged."""
        if self is ImageChain.NONE:
            return image
        compressed = round_trip_jpeg(image)
        if self is ImageChain.LIBERO_UNCROPPED:
            return resize_lanczos3(compressed, size)
        return _crop(_resize(compressed, size), size)


def round_trip_jpeg(image: Image) -> Image:
    """Compress and decompress as TensorFlow does: quality 95, 4:2:0, fast integer IDCT."""
    try:
        # Imported here: a robot whose server runs the chain does not need it.
        import simplejpeg
    except ImportError:
        raise ImportError("the libero image chain needs simplejpeg; pip install it") from None
    buffer = io.BytesIO()
    PillowImage.fromarray(image).save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling="4:2:0")
    decoded: Image = simplejpeg.decode_jpeg(
        buffer.getvalue(), colorspace="RGB", fastdct=True, fastupsample=False
    )
    return decoded


def resize_lanczos3(image: Image, size: int = MODEL_SIZE) -> Image:
    """Resize to a square with `tf.image.resize(..., "lanczos3", antialias=True)`.

    Rows first, then columns, in float32 between them; a frame of that size is returned as it is.
    """
    return np.ascontiguousarray(_resize(image, size).astype(np.uint8).transpose(1, 0, 2))


def crop_centre(image: Image, size: int = MODEL_SIZE) -> Image:
    """Cut out the middle 90 % of the area and scale it up, as `tf.image.crop_and_resize` does."""
    return _crop(image.transpose(1, 0, 2).astype(np.float32, order="C"), size)


def _resize(image: Image, size: int) -> Columns:
    """The resized frame, still float32 but whole numbers; valid until this thread's next call."""
    height, width, _ = image.shape
    if height == width == size:
        return image.transpose(1, 0, 2).astype(np.float32, order="C")
    return resize_to_columns(image, size)


def _crop(columns: Columns, size: int) -> Image:
    """Scale up the middle of a frame, destroying it: across first, then down, as floats in 0..1."""
    width, height, _ = columns.shape
    columns *= _F32(1 / 255)
    rows = _find_scratch(height, size * 3, threading.get_ident())
    for outputs, block in _interpolate(columns.reshape(width, -1), _find_line(width, size)):
        as_pixels(rows)[:, outputs] = as_pixels(block).T
    cropped = np.empty((size, size * 3), np.uint8)
    for outputs, block in _interpolate(rows, _find_line(height, size)):
        # No clipping to [0, 1]: a blend leaves the range of its ends by a rounding error at
        # most, which the truncation swallows.
        block *= _F32(255.5)
        cropped[outputs] = block
    return cropped.reshape(size, size, 3)


@lru_cache(maxsize=16)
def _find_scratch(num_lines: int, num_values: int, thread: int) -> Floats:
    """A buffer of this thread's own: fresh pages of memory would cost more than the arithmetic."""
    return np.empty((num_lines, num_values), np.float32)


@dataclass(frozen=True, eq=False)
class _Line:
    """For each output along one axis, the two inputs it lies between and how far along."""

    lower: NDArray[np.intp]  # [output]
    upper: NDArray[np.intp]  # [output]
    share: Floats  # [output, 1]


def _interpolate(lines: Floats, line: _Line) -> Iterator[tuple[slice, Floats]]:
    """lower + (upper - lower) * share along the first axis: blocks of outputs, [output, value]."""
    for first in range(0, len(line.share), _BLOCK_LINES):
        outputs = slice(first, first + _BLOCK_LINES)
        low = np.take(lines, line.lower[outputs], axis=0)
        high = np.take(lines, line.upper[outputs], axis=0)
        high -= low
        high *= line.share[outputs]
        high += low
        yield outputs, high


@lru_cache(maxsize=64)
def _find_line(length: int, size: int) -> _Line:
    side = _F32(np.sqrt(_F32(CROP_AREA)))
    low = (_F32(1) - side) / _F32(2)
    high = low + side
    step = (high - low) * _F32(length - 1) / _F32(size - 1)
    places = low * _F32(length - 1) + np.arange(size).astype(np.float32) * step
    lower = np.floor(places)
    return _Line(
        lower=lower.astype(np.intp),
        upper=np.ceil(places).astype(np.intp),
        share=(places - lower)[:, None],
    )
