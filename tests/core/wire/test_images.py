"""PNG and JPEG frames: exact where they can be, refused by their header where they must be."""

import io
import math
import struct
import threading
import zlib

import numpy as np
import PIL.Image
import pytest

from deft_core.errors import MessageTooLargeError, UnsupportedMessageError, UnusableValueError
from deft_core.wire.images import (
    LARGE_ONES_TURN,
    LARGE_PIXELS,
    MAX_JPEG_SCANS,
    STRIP_PIXELS,
    ImageEncoding,
    claimed_size,
    decode_image,
    encode_image,
)
from deft_core.wire.limits import WireLimits
from tests.core.samples import frame, saved

pytestmark = pytest.mark.promise


def test_a_png_comes_back_pixel_for_pixel():
    image = frame(33, 17)
    np.testing.assert_array_equal(
        decode_image(encode_image(image, ImageEncoding.PNG), "image"), image
    )


def test_a_jpeg_is_decoded_as_pillow_decodes_it():
    data = encode_image(frame(33, 17), ImageEncoding.JPEG, quality=80)
    with PIL.Image.open(io.BytesIO(data)) as picture:
        expected = np.asarray(picture.convert("RGB"))
    np.testing.assert_array_equal(decode_image(data, "image"), expected)


def test_progressive_jpegs_and_those_with_long_headers_are_read():
    picture = PIL.Image.fromarray(frame(20, 30))
    buffer = io.BytesIO()
    picture.save(
        buffer, "JPEG", progressive=True, comment=b"x" * 60_000, exif=b"Exif\0\0" + b"x" * 9
    )
    assert decode_image(buffer.getvalue(), "image").shape == (20, 30, 3)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1"])
def test_grey_palette_and_transparent_pngs_become_rgb(mode):
    picture = PIL.Image.fromarray(frame(9, 8)).convert(mode)
    expected = np.asarray(picture.convert("RGB"))
    np.testing.assert_array_equal(decode_image(saved(picture, "PNG"), "image"), expected)


def test_sixteen_bit_pictures_are_refused_instead_of_clipped():
    deep = PIL.Image.fromarray(np.full((4, 4), 40_000, np.uint16))
    with pytest.raises(UnusableValueError, match="8-bit RGB"):
        decode_image(saved(deep, "PNG"), "image")


def test_cmyk_jpegs_are_refused():
    with pytest.raises(UnusableValueError, match="CMYK"):
        decode_image(saved(PIL.Image.new("CMYK", (4, 4)), "JPEG"), "image")


@pytest.mark.parametrize("kind", ["GIF", "BMP", "WEBP", "TIFF"])
def test_other_formats_are_unsupported(kind):
    with pytest.raises(UnsupportedMessageError, match="PNG"):
        decode_image(saved(PIL.Image.fromarray(frame()), kind), "image")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_picture_beyond_the_limits_is_refused_by_its_header_alone(kind):
    """The pixels are cut away: whoever tried to decode them would complain of damage instead."""
    data = saved(PIL.Image.new("RGB", (40, 30)), kind)
    header_only = data[:33] if kind == "PNG" else data[: data.index(b"\xff\xda")]
    for limits in (WireLimits(max_image_side=39), WireLimits(max_image_pixels=1199)):
        with pytest.raises(MessageTooLargeError, match="30x40") as caught:
            decode_image(header_only, "cameras.wrist", limits)
        assert caught.value.field == "cameras.wrist"


def test_the_largest_size_that_a_header_claims_is_refused():
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 2**32 - 1, 2**32 - 1)
    with pytest.raises(MessageTooLargeError):
        decode_image(header + bytes(50), "image")


def test_a_second_header_cannot_smuggle_in_a_larger_picture():
    """Decoders believe the last header: 10,000 x 10,000 pixels are 300 MB, from 100 bytes."""
    small = saved(PIL.Image.new("RGB", (8, 8)), "JPEG")
    at = small.index(b"\xff\xc0")
    end = at + 2 + int.from_bytes(small[at + 2 : at + 4], "big")
    large = small[at : at + 5] + struct.pack(">HH", 10_000, 10_000) + small[at + 9 : end]
    png = saved(PIL.Image.new("RGB", (8, 8)), "PNG")
    header = b"IHDR" + struct.pack(">II", 10_000, 10_000) + png[24:29]
    second = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    for data in (small[:end] + large + small[end:], png[:33] + second + png[33:]):
        with pytest.raises(UnusableValueError, match="two headers"):
            decode_image(data, "image")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_picture_cut_anywhere_is_damaged(kind):
    data = saved(PIL.Image.fromarray(frame(40, 40)), kind)
    for end in range(8, len(data) - 20, 37):
        with pytest.raises(UnusableValueError):
            decode_image(data[:end], "image")


def test_a_jpeg_cut_in_its_frame_header_is_unusable():
    data = saved(PIL.Image.fromarray(frame(40, 40)), "JPEG")
    header = data.index(b"\xff\xc0")
    for end in range(header, header + 9):
        with pytest.raises(UnusableValueError, match="no frame header"):
            claimed_size(data[:end], "image")
    assert claimed_size(data[: header + 9], "image") == (40, 40)


def test_a_png_of_no_pixels_is_unusable():
    data = bytearray(saved(PIL.Image.new("RGB", (4, 4)), "PNG"))
    data[16:24] = bytes(8)
    with pytest.raises(UnusableValueError, match="height and width"):
        decode_image(bytes(data), "image")


def many_scans(num_scans: int) -> bytes:
    """Return a progressive JPEG that says its last scan again and again."""
    buffer = io.BytesIO()
    PIL.Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * num_scans + b"\xff\xd9"


def test_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded():
    """Each scan is a pass over all pixels: 65 kB once took a decoder 15 s."""
    with pytest.raises(UnusableValueError, match="scans"):
        decode_image(many_scans(4000), "image")
    assert decode_image(many_scans(1), "image").shape == (64, 64, 3)
    own = many_scans(0).count(b"\xff\xda")
    assert decode_image(many_scans(MAX_JPEG_SCANS - own), "image").shape == (64, 64, 3)
    with pytest.raises(UnusableValueError, match="scans"):
        decode_image(many_scans(MAX_JPEG_SCANS - own + 1), "image")


def png_chunk(name: bytes, data: bytes) -> bytes:
    crc = struct.pack(">I", zlib.crc32(name + data))
    return struct.pack(">I", len(data)) + name + data + crc


@pytest.mark.parametrize(("name", "count"), [(b"iCCP", 400), (b"IDAT", 9000)])
def test_a_png_of_very_many_chunks_is_refused_before_it_is_decoded(name: bytes, count: int):
    data = encode_image(np.zeros((4, 4, 3), np.uint8), ImageEncoding.PNG)
    with pytest.raises(UnusableValueError, match="too many chunks"):
        decode_image(data[:33] + png_chunk(name, b"") * count + data[33:], "image")


def test_a_jpeg_of_very_many_segments_is_refused_before_it_is_decoded():
    data = encode_image(np.zeros((4, 4, 3), np.uint8), ImageEncoding.JPEG)
    for filler in (b"\xff\xe1\x00\x02" * 400, b"\xff" * 400):
        with pytest.raises(UnusableValueError, match="no frame header"):
            decode_image(data[:2] + filler + data[2:], "image")


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA"])
def test_a_picture_of_several_strips_is_pillows(mode: str):
    width = 2048
    shape = (2 * (STRIP_PIXELS // width) + 3, width, 3)
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(image).convert(mode).save(buffer, "PNG")
    expected = np.asarray(PIL.Image.open(buffer).convert("RGB"))
    np.testing.assert_array_equal(decode_image(buffer.getvalue(), "image"), expected)


def test_large_pictures_are_decoded_one_at_a_time_and_others_meanwhile():
    side = math.isqrt(LARGE_PIXELS) + 1
    small, large = (
        encode_image(np.zeros((rows, rows, 3), np.uint8), ImageEncoding.PNG) for rows in (8, side)
    )
    decoded = []
    thread = threading.Thread(target=lambda: decoded.append(decode_image(large, "image")))
    with LARGE_ONES_TURN:
        thread.start()
        thread.join(0.1)
        assert decode_image(small, "image").shape == (8, 8, 3)
        assert decoded == []
    thread.join(120)
    assert decoded[0].shape == (side, side, 3)
