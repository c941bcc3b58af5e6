"""Camera frames on the wire: raw pixels, PNG or JPEG.

Sizes are judged by the header or the shape, before anything is decoded or allocated.
"""

import math
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from enum import Enum
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deft_core.errors import MessageTooLargeError, UnsupportedMessageError, UnusableValueError
from deft_core.types import Image
from deft_core.wire.limits import DEFAULT_LIMITS, ReadContext, WireLimits

if TYPE_CHECKING:
    import PIL.Image


def array_over(data: bytes, dtype: np.dtype[Any], shape: list[int], field: str) -> NDArray[Any]:
    """Return a read-only array over bytes that must match dtype and shape exactly."""
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise UnusableValueError(
            field, f"{len(data)} bytes; {shape} of {dtype.name} takes {expected}"
        )
    return np.frombuffer(data, dtype).reshape(shape)


PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
JPEG_SIGNATURE = b"\xff\xd8\xff"
JPEG_QUALITY = 95
MAX_JPEG_SCANS = 16  # each costs a pass over all pixels; cameras write 1, encoders 10 or so
MAX_EXTRAS = 300  # segments or chunks besides the pixels; a colour profile may take 255
MAX_PIXEL_CHUNKS = 8192  # of a PNG
STRIP_PIXELS = 256 * 1024
LARGE_PIXELS = 2 * 1024 * 1024  # two of the largest at a time take 78 MB
LARGE_ONES_TURN = threading.Lock()

# Pillow's decoders raise these for damaged files, depending on where the damage is.
_DAMAGED = (
    OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, OverflowError,
    struct.error, zlib.error, UserWarning,
)  # fmt: skip
_COLOUR_MODES = ("RGB", "RGBA", "L", "LA", "P", "1")


class ImageEncoding(Enum):
    """How a frame travels. JPEG changes pixels; raw and PNG do not."""

    RAW = "raw"
    PNG = "png"
    JPEG = "jpeg"


def encode_image(image: Image, encoding: ImageEncoding, quality: int = JPEG_QUALITY) -> bytes:
    """Return the bytes of a frame; `quality` matters to JPEG only."""
    if encoding is ImageEncoding.RAW:
        return image.tobytes()
    import PIL.Image  # not needed for raw frames, and slow to import

    buffer = BytesIO()
    picture = PIL.Image.fromarray(image)
    if encoding is ImageEncoding.PNG:
        picture.save(buffer, "PNG", compress_level=1)
    else:
        picture.save(buffer, "JPEG", quality=quality, subsampling=0)
    return buffer.getvalue()


def decode_image(data: bytes, field: str, limits: WireLimits = DEFAULT_LIMITS) -> Image:
    """Return the pixels of a PNG or JPEG file.

    Size limits are applied to what the header claims, before anything is decompressed. Greyscale,
    palette and transparent pictures become RGB (transparency is dropped); EXIF rotation is ignored.
    """
    height, width = claimed_size(data, field)
    _check_work(data, field)
    check_image_size(height, width, field, limits)
    # The decoders themselves, not PIL.Image.open: that one only warns of sizes it finds suspicious.
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile

    decoder = PngImageFile if data.startswith(PNG_SIGNATURE) else JpegImageFile
    try:
        is_large = height * width > LARGE_PIXELS
        with LARGE_ONES_TURN if is_large else nullcontext(), decoder(BytesIO(data)) as picture:
            if picture.size != (width, height):
                raise UnusableValueError(field, "the picture has two headers that contradict")
            if picture.mode not in _COLOUR_MODES:
                raise UnusableValueError(
                    field, f"must be 8-bit RGB or greyscale, got colour mode {picture.mode}"
                )
            return _pixels(picture)
    except _DAMAGED as error:
        raise UnusableValueError(field, f"the picture is damaged: {error}") from error


def _pixels(picture: "PIL.Image.Image") -> Image:
    """Return a picture as RGB, read in strips: all at once Pillow holds it four times."""
    width, height = picture.size
    pixels = np.empty((height, width, 3), np.uint8)
    num_rows = max(1, STRIP_PIXELS // width)
    for top in range(0, height, num_rows):
        strip = picture.crop((0, top, width, min(top + num_rows, height)))
        converted = strip if strip.mode == "RGB" else strip.convert("RGB")
        pixels[top : top + num_rows] = np.asarray(converted)
    return pixels


def _check_work(data: bytes, field: str) -> None:
    """Refuse a picture that keeps a decoder busy with other things than its pixels."""
    if not data.startswith(PNG_SIGNATURE):
        num_scans = data.count(b"\xff\xda")  # never less than there are: pixels hold no markers
        if num_scans > MAX_JPEG_SCANS:
            raise UnusableValueError(
                field, f"the JPEG has {num_scans} scans; at most {MAX_JPEG_SCANS} are allowed"
            )
        return
    counts = Counter(kind == b"IDAT" for kind in islice(_png_chunks(data), _MAX_CHUNKS + 1))
    if counts[True] > MAX_PIXEL_CHUNKS or counts[False] > MAX_EXTRAS:
        raise UnusableValueError(field, "the PNG has too many chunks; save it anew")


def check_image_size(height: int, width: int, field: str, limits: WireLimits) -> None:
    """Refuse a frame that is empty or beyond the limits."""
    if height < 1 or width < 1:
        raise UnusableValueError(field, f"must have height and width, got {height}x{width}")
    if max(height, width) > limits.max_image_side or height * width > limits.max_image_pixels:
        raise MessageTooLargeError(
            field,
            f"{height}x{width} pixels; at most {limits.max_image_side} a side "
            f"and {limits.max_image_pixels} in all are allowed: scale it down",
        )


def claim_pixels(height: int, width: int, field: str, context: ReadContext) -> None:
    """Refuse a picture that would take more memory than its message may have; hold what it takes.

    The pictures of a message may together have no more pixels than one may have alone.
    """
    check_image_size(height, width, field, context.limits)
    most = context.limits.max_image_pixels
    context.num_claimed += height * width
    if context.num_claimed > most:
        raise MessageTooLargeError(
            field,
            f"with it the message's pictures have {context.num_claimed} pixels; at most {most} "
            "together are allowed: scale them down",
        )
    context.hold(3 * height * width)


def claimed_size(data: bytes, field: str) -> tuple[int, int]:
    """Return height and width as the header states them."""
    if data.startswith(PNG_SIGNATURE):
        if len(data) < 24 or data[12:16] != b"IHDR":
            raise UnusableValueError(field, "the PNG ends before its header does")
        width, height = struct.unpack(">II", data[16:24])
        return height, width
    if data.startswith(JPEG_SIGNATURE):
        for marker, start in islice(_jpeg_segments(data), MAX_EXTRAS):
            if marker in _JPEG_FRAME_MARKERS and start + 7 <= len(data):
                height, width = struct.unpack(">HH", data[start + 3 : start + 7])
                return height, width
        raise UnusableValueError(field, "the JPEG has no frame header near its beginning")
    raise UnsupportedMessageError(field, "neither PNG nor JPEG; send one of these, or raw pixels")


_MAX_CHUNKS = MAX_EXTRAS + MAX_PIXEL_CHUNKS


def _png_chunks(data: bytes) -> Iterator[bytes]:
    """Yield the type of each chunk."""
    at = len(PNG_SIGNATURE)
    while at + 8 <= len(data):
        yield data[at + 4 : at + 8]
        at += 12 + int.from_bytes(data[at : at + 4], "big")


# SOF0 to SOF15, without the three in that range that mean something else (DHT, JPG, DAC).
_JPEG_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE_MARKERS = frozenset(range(0xD0, 0xDA)) | {0x01}


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield each marker and where its length field starts, up to the first scan."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        yield marker, at + 2
        if marker == 0xFF:  # padding
            at += 1
            continue
        if marker == 0xDA:
            return
        bare = marker in _JPEG_BARE_MARKERS
        at += 2 if bare else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
