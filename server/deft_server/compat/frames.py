"""Peers' camera frames, states and texts, checked and brought into the form of an Observation."""

from itertools import chain, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from deft_client.errors import MalformedMessageError, MessageTooLargeError, UnusableValueError
from deft_client.types import Image
from deft_client.wire.fields import WireLimits
from deft_client.wire.images import check_image_size

MAX_DIMENSIONS = 8

# Every spelling numpy itself writes for booleans, integers and floats of up to eight bytes.
_ONE_BYTE = ("|b1", "|i1", "|u1")
_WIDER = tuple(
    order + kind
    for order, kind in product("<>", ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8"))
)
SAFE_DTYPES = {name: np.dtype(name) for name in chain(_ONE_BYTE, _WIDER)}
SAFE_DTYPES |= {dtype.name: dtype for name, dtype in SAFE_DTYPES.items() if name[0] in "|<"}


def safe_dtype(name: object, field: str) -> np.dtype[np.generic]:
    """Return the dtype of that name, if it is one of plain numbers."""
    known = SAFE_DTYPES.get(name) if isinstance(name, str) else None
    if known is None:
        raise UnusableValueError(
            f"{field}.dtype",
            f"must be a boolean, integer or float dtype such as '<f4', got {brief(name)}",
        )
    return known


def safe_shape(shape: object, field: str) -> tuple[int, ...]:
    """Return a shape whose entries are counts."""
    if not isinstance(shape, list | tuple) or len(shape) > MAX_DIMENSIONS:
        raise UnusableValueError(
            f"{field}.shape",
            f"must be a list of at most {MAX_DIMENSIONS} counts, got {brief(shape)}",
        )
    if not all(type(length) is int and length >= 0 for length in shape):
        raise UnusableValueError(f"{field}.shape", f"must hold counts only, got {brief(shape)}")
    return tuple(shape)


def build_array(data: object, dtype: object, shape: object, field: str) -> NDArray[np.generic]:
    """Return a read-only array over bytes that must match dtype and shape exactly."""
    if not isinstance(data, bytes):
        raise MalformedMessageError(f"{field}.data", f"must be bytes, got {type(data).__name__}")
    kind = safe_dtype(dtype, field)
    lengths = safe_shape(shape, field)
    expected = prod(lengths) * kind.itemsize
    if expected != len(data):
        raise UnusableValueError(
            field, f"{kind.name} {list(lengths)} takes {expected} bytes, got {len(data)}"
        )
    values: NDArray[np.generic] = np.frombuffer(data, kind)
    if kind.kind == "b":  # any byte but 0 and 1 would be an invalid numpy boolean
        values = values.view(np.uint8) != 0
    return values.reshape(lengths)


def brief(value: object, limit: int = 60) -> str:
    """Return a value for an error message, cut to a readable length."""
    if isinstance(value, str | bytes | list | tuple | dict):
        value = value[:limit] if not isinstance(value, dict) else list(value)[:8]
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


_GREY_OR_COLOUR = (1, 2, 3, 4)  # grey, grey + alpha, RGB, RGB + alpha


def read_frame(value: object, field: str, limits: WireLimits) -> Image:
    """Return an 8-bit picture as RGB; greyscale is repeated, transparency dropped."""
    if not isinstance(value, np.ndarray):
        raise UnusableValueError(field, f"must be an encoded uint8 array, got {brief(value)}")
    if value.dtype != np.uint8 or value.ndim not in (2, 3):
        raise UnusableValueError(
            field, f"must be uint8 [height, width, 3], got {value.dtype} {list(value.shape)}"
        )
    check_image_size(value.shape[0], value.shape[1], field, limits)
    if value.ndim == 2:
        value = value[:, :, None]
    channels = value.shape[2]
    if channels not in _GREY_OR_COLOUR:
        raise UnusableValueError(f"{field}.shape", f"must have 1 to 4 channels, got {channels}")
    if channels < 3:
        return np.repeat(value[:, :, :1], 3, axis=2)
    return value if channels == 3 else np.ascontiguousarray(value[:, :, :3])


def read_openpi_frame(value: object, field: str, limits: WireLimits) -> Image:
    """Return a picture as openpi's transforms see it: floats in [0, 1] and channels first too."""
    if isinstance(value, np.ndarray) and value.ndim == 3:
        if value.dtype.kind == "f":
            value = _from_unit_range(value, field)
        if value.shape[0] == 3 and value.shape[2] != 3:
            value = np.ascontiguousarray(np.moveaxis(value, 0, 2))
    return read_frame(value, field, limits)


def read_state(value: object, field: str, limits: WireLimits) -> NDArray[np.float32]:
    """Return a vector of finite numbers."""
    if not isinstance(value, np.ndarray) or value.ndim > 1 or value.dtype.kind not in "iuf":
        raise UnusableValueError(field, f"must be a vector of numbers, got {brief(value)}")
    if value.size > limits.max_state_dim:
        raise MessageTooLargeError(
            field, f"{value.size} numbers; at most {limits.max_state_dim} are taken"
        )
    with np.errstate(over="ignore"):  # what does not fit float32 becomes infinite, and is refused
        state = np.atleast_1d(value).astype(np.float32)
    if not np.isfinite(state).all():
        raise UnusableValueError(field, "must be finite in float32, got NaN or infinity")
    return state


def read_text(value: object, field: str, limits: WireLimits) -> str:
    """Return the instruction."""
    if not isinstance(value, str):
        raise UnusableValueError(field, f"must be text, got {brief(value)}")
    return _checked(value, field, limits.max_instruction_chars)


def read_name(value: object, field: str, limits: WireLimits) -> str | None:
    """Return a short name, or None where there is none."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise UnusableValueError(field, f"must be text, got {brief(value)}")
    return _checked(value, field, limits.max_name_chars)


def missing(field: str, known: object) -> MalformedMessageError:
    """Return the complaint about a field that is not there."""
    names = ", ".join(map(str, list(known)[:12])) if isinstance(known, dict) else "nothing"
    return MalformedMessageError(field, f"missing; the message has {names or 'no fields'}")


def _checked(text: str, field: str, max_chars: int) -> str:
    if len(text) > max_chars:
        raise MessageTooLargeError(field, f"{len(text)} characters; at most {max_chars} are taken")
    if not text.isascii() and text.encode("utf-8", "replace").decode() != text:
        raise UnusableValueError(field, "is not valid Unicode: it holds half a surrogate pair")
    return text


def _from_unit_range(value: NDArray[np.generic], field: str) -> NDArray[np.uint8]:
    if not np.isfinite(value).all() or value.min(initial=0) < 0 or value.max(initial=0) > 1:
        raise UnusableValueError(field, "a picture of floats must stay within [0, 1]")
    return (255 * value.astype(np.float32)).astype(np.uint8)
