"""What OpenVLA's LIBERO evaluation does to a frame, in numpy, equal to TensorFlow bit for bit.

A JPEG round trip, an antialiased Lanczos resize, which is the slow part and comes first below, and
a crop of the centre that is scaled back bilinearly. `ImageChain` picks the steps.
"""

import ctypes
import io
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage

from deft_core.types import Image

_F32 = np.float32
_PI = _F32(3.14159265359)
_LANCZOS_RADIUS = _F32(3)
_MAX_DOUBTFUL = 4096  # values summed in order at a time

Floats = NDArray[np.float32]
Columns = NDArray[np.float32]  # [column, row, channel]


def as_pixels(lines: Floats) -> NDArray[np.void]:
    """A view with one item per pixel of three channels: transposing then moves whole pixels."""
    return lines.view(np.dtype((np.void, 12)))


class _Resizer:
    """Lanczos3 for frames of one size. Keeps its buffers, so one thread at a time may use it.

    TensorFlow adds one weighted input after the other. A matrix product adds in another order,
    so its result may differ in the last bits; that matters only where it lies so close to the
    middle between two whole numbers that it could round either way. Those few values are summed
    again in TensorFlow's order.
    """

    def __init__(self, height: int, width: int, size: int) -> None:
        self._down = _find_axis(height, size)
        self._across = _find_axis(width, size)
        # Distance to a middle below which the two orders could round apart. Each pass adds at
        # most num_taps roundings of 2^-24, to either order, of sums below 255 x gain.
        num_roundings = 2 * (self._down.num_taps + self._across.num_taps)
        gain = self._down.gain * self._across.gain
        self._doubt = _F32(1.01 * num_roundings * 2.0**-24 * 255 * gain)
        self._rows = self._down.allocate(width * 3)
        self._columns = self._across.allocate(size * 3)
        self._narrowed = np.empty((size, width * 3), np.float32)
        self._sums = np.empty((size, size * 3), np.float32)
        self._rounded = np.empty((size, size * 3), np.float32)

    def resize(self, image: Image) -> Columns:
        """Resize a frame; the result is overwritten by the next call."""
        self._down.inner(self._rows)[:] = image.reshape(len(image), -1)
        self._down.sum(self._rows, out=self._narrowed)
        as_pixels(self._across.inner(self._columns))[:] = as_pixels(self._narrowed).T
        self._across.sum(self._columns, out=self._sums)
        rounded = np.rint(self._sums, out=self._rounded)
        error = np.subtract(self._sums, rounded, out=self._sums)
        doubtful = np.flatnonzero(np.abs(error, out=error) > _F32(0.5) - self._doubt)
        for first in range(0, len(doubtful), _MAX_DOUBTFUL):
            some = doubtful[first : first + _MAX_DOUBTFUL]
            rounded.flat[some] = np.rint(self._sum_in_order(image, some))
        size = len(rounded)
        return np.clip(rounded, 0, 255, out=rounded).reshape(size, size, 3)

    def _sum_in_order(self, image: Image, places: NDArray[np.intp]) -> Floats:
        """Values at flat places of the result, [place], as TensorFlow adds them."""
        size = len(self._sums)
        column, row, channel = np.unravel_index(places, (size, size, 3))
        down, across = self._down, self._across
        rows, columns = down.inputs[row], across.inputs[column]
        values = image[rows[:, :, None], columns[:, None, :], channel[:, None, None]]
        narrowed = _add_in_order(values.transpose(1, 0, 2) * down.weights[row].T[:, :, None])
        return _add_in_order(narrowed.T * across.weights[column].T)


def _add_in_order(terms: Floats) -> Floats:
    """Sum along the first axis, one term after the other."""
    total: Floats = terms[0].copy()
    for term in terms[1:]:
        total += term
    return total


@lru_cache(maxsize=16)
def _find_resizer(height: int, width: int, size: int, thread: int) -> _Resizer:
    return _Resizer(height, width, size)


@dataclass(frozen=True, eq=False)
class _Axis:
    """The weighted sums along one axis.

    As lists, for adding in order: `inputs` and `weights` of each output. As matrices: inputs come
    in chunks of equal length, from each of which come equally many outputs (shrinking 256 to 224,
    7 from each 8), and one matrix per chunk makes them from a window that reaches beyond it.
    """

    inputs: NDArray[np.intp]  # [output, tap]
    weights: Floats  # [output, tap], 0 behind an output's last input
    matrices: Floats  # [chunk, output of chunk, input of window]
    chunk: int  # inputs per chunk
    length: int  # inputs
    before: int  # zeros in front of the input, for the first window
    after: int

    @property
    def num_taps(self) -> int:
        """Inputs per output, at most."""
        return len(self.weights[0])

    @property
    def gain(self) -> float:
        """How much larger than the inputs a sum can be."""
        return float(np.abs(self.weights).sum(axis=1).max())

    def allocate(self, num_values: int) -> Floats:
        """Return room for the input and the zeros around it, [input, value]."""
        return np.zeros((self.before + self.length + self.after, num_values), np.float32)

    def inner(self, padded: Floats) -> Floats:
        """Return a view of what is not padding."""
        return padded[self.before : self.before + self.length]

    def sum(self, padded: Floats, out: Floats) -> None:
        """Make [output, value] from the padded [input, value], in whatever order is fastest."""
        num_chunks, num_outputs, span = self.matrices.shape
        line, value = padded.strides
        windows = np.lib.stride_tricks.as_strided(
            padded,
            (num_chunks, span, padded.shape[1]),
            (self.chunk * line, line, value),
            writeable=False,
        )
        np.matmul(self.matrices, windows, out=out.reshape(num_chunks, num_outputs, -1))


@lru_cache(maxsize=64)
def _find_axis(length: int, size: int) -> _Axis:
    spans = _lanczos_spans(length, size)
    num_taps = max(len(own) for _, own in spans)
    weights = np.zeros((size, num_taps), np.float32)
    for output, (_, own) in enumerate(spans):
        weights[output, : len(own)] = own
    starts = np.array([start for start, _ in spans])
    num_chunks = math.gcd(length, size)
    chunk, per_chunk = length // num_chunks, size // num_chunks
    # Where each output's inputs start and end, counted from its own chunk.
    shifts = starts - chunk * (np.arange(size) // per_chunk)
    first, last = int(shifts.min()), int(shifts.max()) + num_taps
    matrices = np.zeros((size, last - first), np.float32)
    for output, shift in enumerate(shifts - first):
        matrices[output, shift : shift + num_taps] = weights[output]
    return _Axis(
        inputs=np.minimum(starts[:, None] + np.arange(num_taps), length - 1),
        weights=weights,
        matrices=matrices.reshape(num_chunks, per_chunk, -1),
        chunk=chunk,
        length=length,
        before=-first,
        after=max(0, last - chunk),
    )


def _lanczos_spans(length: int, size: int) -> list[tuple[int, Floats]]:
    """The first of the inputs that each output sums, and their weights [tap]."""
    inverse = _F32(1 / float(_F32(size) / _F32(length)))
    stretch = max(inverse, _F32(1))
    reach = _LANCZOS_RADIUS * stretch
    sine = _find_sine()
    spans = []
    for output in range(size):
        centre = _F32(output + 0.5) * inverse
        start = max(math.ceil(centre - reach - _F32(0.5)), 0)
        end = min(math.floor(centre + reach - _F32(0.5)), length - 1) + 1
        places = np.arange(start, end).astype(np.float32) + _F32(0.5)
        weights = _lanczos_kernel((places - centre) * (_F32(1) / stretch), sine)
        total = _F32(0)
        for one in weights:  # one after the other, like every sum here
            total += one
        spans.append((start, weights * (_F32(1) / total)))
    return spans


def _lanczos_kernel(offsets: Floats, sine: Callable[[float], float]) -> Floats:
    """3 sin(pi x) sin(pi x / 3) / (pi x)^2, in the original's order of multiplications."""
    distance = np.abs(offsets)
    angle = _PI * distance
    wide = np.array([sine(float(one)) for one in angle], np.float32)
    narrow = np.array([sine(float(one)) for one in angle / _LANCZOS_RADIUS], np.float32)
    kernel = np.ones_like(distance)
    np.divide(
        _LANCZOS_RADIUS * wide * narrow,
        _PI * _PI * distance * distance,
        out=kernel,
        where=distance > _F32(1e-3),
    )
    kernel[distance > _LANCZOS_RADIUS] = 0
    return kernel


def _find_sine() -> Callable[[float], float]:
    """The C library's float32 sine, which TensorFlow calls too.

    Where it cannot be reached, the double-precision one: weights may then differ by one unit in
    the last place.
    """
    try:
        sine = ctypes.CDLL(None).sinf
    except (AttributeError, OSError, TypeError):
        return math.sin
    sine.restype = ctypes.c_float
    sine.argtypes = [ctypes.c_float]
    found: Callable[[float], float] = sine
    return found


CROP_AREA = 0.9  # share of the frame that training with random crops leaves visible
JPEG_QUALITY = 95
MODEL_SIZE = 224

# Lines blended at a time: few enough for the processor's cache, enough to hide the calls.
_BLOCK_LINES = 16


class ImageChain(Enum):
    """What happens to a frame before the checkpoint's own processor resizes it."""

    NONE = "none"
    LIBERO = "libero"
    LIBERO_UNCROPPED = "libero-uncropped"  # for fine-tunes without image augmentation
    OFT = "oft"  # OFT's server: a frame of the model's size is not compressed again
    OFT_UNCROPPED = "oft-uncropped"

    def apply(self, image: Image, size: int = MODEL_SIZE) -> Image:
        """Return the frame as the processor is to get it; `NONE` returns it unchanged."""
        if self is ImageChain.NONE:
            return image
        is_prepared = self in _SERVER_CHAINS and image.shape[:2] == (size, size)
        compressed = image if is_prepared else round_trip_jpeg(image)
        if self in (ImageChain.LIBERO_UNCROPPED, ImageChain.OFT_UNCROPPED):
            return resize_lanczos3(compressed, size)
        return _crop(_resize(compressed, size), size)


# Their clients may have compressed and resized a frame already.
_SERVER_CHAINS = (ImageChain.OFT, ImageChain.OFT_UNCROPPED)


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
    """The resized frame: float32, but whole numbers from 0 to 255.

    Rows first, then columns, in float32 between them; valid until this thread's next call.
    """
    height, width, _ = image.shape
    if height == width == size:
        return image.transpose(1, 0, 2).astype(np.float32, order="C")
    return _find_resizer(height, width, size, threading.get_ident()).resize(image)


def _crop(columns: Columns, size: int) -> Image:
    """Scale up the middle of a frame, destroying it: across first, then down, as floats in 0..1."""
    width, height, _ = columns.shape
    columns *= _F32(1 / 255)
    rows = _find_scratch(height, size * 3, threading.get_ident())
    for outputs, block in _interpolate(columns.reshape(width, -1), _find_places(width, size)):
        as_pixels(rows)[:, outputs] = as_pixels(block).T
    cropped = np.empty((size, size * 3), np.uint8)
    for outputs, block in _interpolate(rows, _find_places(height, size)):
        # No clipping to [0, 1]: a blend leaves the range of its ends by a rounding error at
        # most, which the truncation swallows.
        block *= _F32(255.5)
        cropped[outputs] = block
    return cropped.reshape(size, size, 3)


@lru_cache(maxsize=16)
def _find_scratch(num_lines: int, num_values: int, thread: int) -> Floats:
    """A buffer of this thread's own: fresh pages of memory would cost more than the arithmetic."""
    return np.empty((num_lines, num_values), np.float32)


# For each output along one axis: the two inputs it lies between, [output] each, and how far along,
# [output, 1].
_Places = tuple[NDArray[np.intp], NDArray[np.intp], Floats]


def _interpolate(lines: Floats, places: _Places) -> Iterator[tuple[slice, Floats]]:
    """lower + (upper - lower) * share along the first axis: blocks of outputs, [output, value]."""
    lower, upper, share = places
    for first in range(0, len(share), _BLOCK_LINES):
        outputs = slice(first, first + _BLOCK_LINES)
        low = np.take(lines, lower[outputs], axis=0)
        high = np.take(lines, upper[outputs], axis=0)
        high -= low
        high *= share[outputs]
        high += low
        yield outputs, high


@lru_cache(maxsize=64)
def _find_places(length: int, size: int) -> _Places:
    side = _F32(np.sqrt(_F32(CROP_AREA)))
    low = (_F32(1) - side) / _F32(2)
    high = low + side
    step = (high - low) * _F32(length - 1) / _F32(size - 1)
    places = low * _F32(length - 1) + np.arange(size).astype(np.float32) * step
    lower = np.floor(places)
    return lower.astype(np.intp), np.ceil(places).astype(np.intp), (places - lower)[:, None]
