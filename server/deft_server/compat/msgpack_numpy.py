"""Binary frames of the WebSocket peers: msgpack maps that carry arrays and pictures.

openpi marks an array with bytes keys (`b"__ndarray__"`), vla-eval with str keys and additionally
sends pictures as `"__image__"`. Both arrive at one endpoint, so one reader understands both.
"""

from dataclasses import dataclass

import msgpack
import numpy as np

from deft_client.errors import (
    MalformedMessageError,
    MessageTooLargeError,
    UnsupportedMessageError,
    UnusableValueError,
)
from deft_client.wire.fields import DEFAULT_LIMITS, WireLimits
from deft_client.wire.images import check_image_size, decode_image
from deft_server.compat.frames import brief, build_array, safe_dtype

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
    if len(frame) > limits.max_bytes:
        raise MessageTooLargeError(
            "frame", f"{len(frame)} bytes; at most {limits.max_bytes} are taken"
        )
    reader = _Reader(limits, decodes_pictures)
    try:
        return msgpack.unpackb(
            frame,
            object_hook=reader.revive,
            list_hook=reader.count,
            ext_hook=_refuse_extension,
            max_array_len=limits.max_trace_values,
            max_map_len=_MAX_MAP_ENTRIES,
        )
    except (ValueError, RecursionError, TypeError, msgpack.UnpackException) as error:
        # TypeError: a map key that cannot be hashed. ValueError covers damage, text that is not
        # UTF-8, nesting too deep and lengths beyond the limits.
        raise MalformedMessageError("frame", f"not a msgpack message: {error}") from None


def pack(value: object) -> bytes:
    """Return a frame in openpi's dialect."""
    return bytes(msgpack.packb(value, default=_openpi_form))


def pack_with_text_keys(value: object) -> bytes:
    """Return a frame in vla-eval's dialect."""
    return bytes(msgpack.packb(value, default=_vla_eval_form))


@dataclass
class _Reader:
    """Rebuilds the marked maps of one frame and counts how many objects it makes us hold."""

    limits: WireLimits
    decodes_pictures: bool
    containers: int = 0

    def count(self, values: list[object]) -> list[object]:
        self.containers += 1
        if self.containers > self.limits.max_lists:
            raise MessageTooLargeError(
                "frame", f"more than {self.limits.max_lists} lists and maps in one message"
            )
        return values

    def revive(self, entries: dict[object, object]) -> object:
        self.count([])
        if b"__ndarray__" in entries:
            data, dtype, shape = (entries.get(key) for key in (b"data", b"dtype", b"shape"))
            return build_array(data, dtype, shape, "array")
        if "__ndarray__" in entries:
            data, dtype, shape = (entries.get(key) for key in ("data", "dtype", "shape"))
            return build_array(data, dtype, shape, "array")
        if b"__npgeneric__" in entries:
            return _scalar(entries.get(b"data"), entries.get(b"dtype"))
        if "__image__" in entries:
            return self._picture(entries)
        return entries

    def _picture(self, entries: dict[object, object]) -> object:
        form, data = entries.get("format"), entries.get("data")
        if not isinstance(data, bytes):
            raise MalformedMessageError("image.data", f"must be bytes, got {type(data).__name__}")
        if form == "raw":
            pixels = build_array(data, entries.get("dtype", "|u1"), entries.get("shape"), "image")
            if pixels.ndim != 3:
                raise UnusableValueError(
                    "image.shape", f"must be [height, width, channels], got {list(pixels.shape)}"
                )
            check_image_size(pixels.shape[0], pixels.shape[1], "image", self.limits)
            return pixels
        if form in ("png", "jpeg"):
            if not self.decodes_pictures:
                raise PictureFoundError
            return decode_image(data, "image", self.limits)
        raise UnsupportedMessageError(
            "image.format", f"must be png, jpeg or raw, got {brief(form)}"
        )


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
