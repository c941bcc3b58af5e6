"""Binary frames of the WebSocket peers: msgpack maps that carry arrays and pictures.

openpi marks an array with bytes keys (`b"__ndarray__"`), vla-eval with str keys and additionally
sends pictures as `"__image__"`. Both arrive at one endpoint, so one reader understands both.
"""

from collections.abc import Callable
from functools import partial

import msgpack
import numpy as np

from deft_client.errors import MalformedMessageError, UnsupportedMessageError, UnusableValueError
from deft_client.peers.values import build_array, safe_dtype
from deft_client.wire.fields import DEFAULT_LIMITS, WireLimits, brief
from deft_client.wire.images import check_image_size, decode_image
from deft_client.wire.msgpack_codec import UNREADABLE, check_bytes, counter

Entries = dict[object, object]
_MAX_MAP_ENTRIES = 1024
_SCALARS: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float)}


class PictureFoundError(Exception):
    """There is a PNG or JPEG in the frame, and decoding it takes too long to do it here."""


def unpack(
    frame: bytes, limits: WireLimits = DEFAULT_LIMITS, decodes_pictures: bool = True
) -> object:
    """Return what a frame says, arrays and pictures rebuilt.

    Without `decodes_pictures` it is quick, and raises `PictureFoundError` where there is one.
    """
    return unpack_maps(frame, limits, partial(_revive, limits, decodes_pictures))


def unpack_maps(frame: bytes, limits: WireLimits, revive: Callable[[Entries], object]) -> object:
    """Return what a frame says, each map as `revive` makes it; lists and maps are counted."""
    check_bytes(frame, limits, "frame")
    count = counter(limits, "frame")
    try:
        return msgpack.unpackb(
            frame,
            object_hook=lambda entries: revive(count(entries)),
            list_hook=count,
            ext_hook=_refuse_extension,
            max_array_len=limits.max_trace_values,
            max_map_len=_MAX_MAP_ENTRIES,
        )
    except UNREADABLE as error:
        # A map key that cannot be hashed, text that is not UTF-8, nesting too deep, lengths beyond
        # the limits, or plain damage.
        raise MalformedMessageError("frame", f"not a msgpack message: {error}") from None


def pack(value: object) -> bytes:
    """Return a frame in openpi's dialect."""
    return bytes(msgpack.packb(value, default=_openpi_form))


def pack_with_text_keys(value: object) -> bytes:
    """Return a frame in vla-eval's dialect."""
    return bytes(msgpack.packb(value, default=_vla_eval_form))


def _revive(limits: WireLimits, decodes_pictures: bool, entries: Entries) -> object:
    """Return the array, scalar or picture that a marked map stands for, or the map."""
    if b"__ndarray__" in entries:
        data, dtype, shape = (entries.get(key) for key in (b"data", b"dtype", b"shape"))
        return build_array(data, dtype, shape, "array")
    if "__ndarray__" in entries:
        data, dtype, shape = (entries.get(key) for key in ("data", "dtype", "shape"))
        return build_array(data, dtype, shape, "array")
    if b"__npgeneric__" in entries:
        return _scalar(entries.get(b"data"), entries.get(b"dtype"))
    if "__image__" in entries:
        return _picture(entries, limits, decodes_pictures)
    return entries


def _picture(entries: Entries, limits: WireLimits, decodes_pictures: bool) -> object:
    form, data = entries.get("format"), entries.get("data")
    if not isinstance(data, bytes):
        raise MalformedMessageError("image.data", f"must be bytes, got {brief(data)}")
    if form == "raw":
        pixels = build_array(data, entries.get("dtype", "|u1"), entries.get("shape"), "image")
        if pixels.ndim != 3:
            raise UnusableValueError(
                "image.shape", f"must be [height, width, channels], got {list(pixels.shape)}"
            )
        check_image_size(pixels.shape[0], pixels.shape[1], "image", limits)
        return pixels
    if form in ("png", "jpeg"):
        if not decodes_pictures:
            raise PictureFoundError
        return decode_image(data, "image", limits)
    raise UnsupportedMessageError("image.format", f"must be png, jpeg or raw, got {brief(form)}")


def _scalar(value: object, dtype: object) -> object:
    """Return the number itself: nothing downstream asks which width it had."""
    allowed = _SCALARS[safe_dtype(dtype, "scalar").kind]
    if type(value) not in allowed:
        raise UnusableValueError("scalar.data", f"must be a {dtype}, got {brief(value)}")
    return value


def _refuse_extension(code: int, data: bytes) -> object:
    raise UnsupportedMessageError("frame", f"msgpack extension type {code} is not taken")


def _openpi_form(value: object) -> object:
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"cannot send a {type(value).__name__}")


def _vla_eval_form(value: object) -> object:
    if isinstance(value, np.ndarray):
        return {
            "__ndarray__": True,
            "data": value.tobytes(),
            "dtype": value.dtype.str,
            "shape": list(value.shape),
        }
    raise TypeError(f"cannot send a {type(value).__name__}")
