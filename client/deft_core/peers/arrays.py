"""Arrays, camera frames, states and texts as peers' messages carry them, none of it trusted.

Only plain numbers are built, and a shape is compared with the bytes that are really there before
anything is allocated. Packs and unpacks the msgpack of openpi and of vla-eval, with the library
`msgpack`: its hooks make arrays of marked maps, and count what a stranger has us build.
"""

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any, TypeVar

import msgpack
import numpy as np
from numpy.typing import NDArray

from deft_core.errors import (
    MalformedMessageError,
    MessageTooLargeError,
    UnsupportedMessageError,
    UnusableValueError,
)
from deft_core.types import Image
from deft_core.wire.formats import check_bytes
from deft_core.wire.images import (
    array_over,
    check_image_size,
    claim_pixels,
    claimed_size,
    decode_image,
)
from deft_core.wire.limits import DEFAULT_LIMITS, ReadContext, WireLimits
from deft_core.wire.refusals import brief, check_text

SizedT = TypeVar("SizedT", bound=Sized)
MAX_AXES = 8
MAX_LIST_ITEMS = 65_536
MAX_MAP_ENTRIES = 1024  # of one map; those of a message have a few dozen
# Every spelling numpy itself writes for booleans, integers and floats of up to eight bytes.
_ONE_BYTE = ("|b1", "|i1", "|u1")
_WIDER = tuple(
    order + kind
    for order, kind in product("<>", ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8"))
)
SAFE_DTYPES = {name: np.dtype(name) for name in chain(_ONE_BYTE, _WIDER)}
SAFE_DTYPES |= {dtype.name: dtype for name, dtype in SAFE_DTYPES.items() if name[0] in "|<"}


def safe_dtype(name: object, field: str) -> np.dtype[Any]:
    """Return the dtype of that name, if it is one of plain numbers."""
    known = SAFE_DTYPES.get(name) if isinstance(name, str) else None
    if known is None:
        raise UnusableValueError(
            f"{field}.dtype",
            f"must be a boolean, integer or float dtype such as '<f4', got {brief(name)}",
        )
    return known


def read_shape(value: object, field: str) -> list[int]:
    """Return a shape whose entries are counts."""
    if not isinstance(value, list) or len(value) > MAX_AXES:
        raise UnusableValueError(
            field, f"must be a list of at most {MAX_AXES} counts, got {brief(value)}"
        )
    if not {int}.issuperset(map(type, value)) or min(value, default=0) < 0:
        raise UnusableValueError(
            field, f"must hold counts only, got {', '.join(map(brief, value))}"
        )
    return value


def build_array(data: object, dtype: object, shape: object, field: str) -> NDArray[Any]:
    """Return a read-only array over bytes that must match dtype and shape exactly."""
    if not isinstance(data, bytes):
        raise MalformedMessageError(f"{field}.data", f"must be bytes, got {brief(data)}")
    kind = safe_dtype(dtype, field)
    values = array_over(data, kind, read_shape(shape, f"{field}.shape"), field)
    # Any byte but 0 and 1 would be an invalid numpy boolean.
    return values.view(np.uint8) != 0 if kind.kind == "b" else values


@dataclass(frozen=True)
class EncodedPicture:
    """A PNG or JPEG in a message. It is decoded where a camera is read, and nowhere else."""

    data: bytes


def has_pictures(fields: Mapping[str, object]) -> bool:
    """Would reading the cameras of a message decode a PNG or JPEG, and so take a while?"""
    maps = (value.values() for value in fields.values() if isinstance(value, dict))
    return any(isinstance(value, EncodedPicture) for value in chain(fields.values(), *maps))


_GREY_OR_COLOUR = (1, 2, 3, 4)  # grey, grey + alpha, RGB, RGB + alpha


def read_frame(value: object, field: str, context: ReadContext) -> Image:
    """Return an 8-bit picture as RGB; greyscale is repeated, transparency dropped."""
    return _judged(value, field, context)()


def read_frames(pictures: Iterable[tuple[str, object]], context: ReadContext) -> list[Image]:
    """Return the pictures of a message, given with their fields; judge all, then decode them."""
    return [decode() for decode in [_judged(value, field, context) for field, value in pictures]]


def _judged(value: object, field: str, context: ReadContext) -> Callable[[], Image]:
    """Return what decodes a picture that may be used."""
    if isinstance(value, EncodedPicture):
        claim_pixels(*claimed_size(value.data, field), field, context)
        return partial(decode_image, value.data, field, context.limits)
    if not isinstance(value, np.ndarray):
        raise UnusableValueError(field, f"must be an encoded uint8 array, got {brief(value)}")
    if value.dtype != np.uint8 or value.ndim not in (2, 3):
        raise UnusableValueError(
            field, f"must be uint8 [height, width, 3], got {value.dtype} {list(value.shape)}"
        )
    height, width = value.shape[:2]
    check_image_size(height, width, field, context.limits)
    if value.ndim == 2:
        value = value[:, :, None]
    channels = value.shape[2]
    if channels not in _GREY_OR_COLOUR:
        raise UnusableValueError(f"{field}.shape", f"must have 1 to 4 channels, got {channels}")
    if channels < 3:
        claim_pixels(height, width, field, context)
        return partial(np.repeat, value[:, :, :1], 3, axis=2)
    colours: Image = value if channels == 3 else np.ascontiguousarray(value[:, :, :3])
    return lambda: colours


def read_state(value: object, field: str, limits: WireLimits) -> NDArray[np.float32]:
    """Return a vector of finite numbers, which may come as a list."""
    if isinstance(value, list) and len(value) <= limits.max_state_dim:
        value = _as_vector(value)
    if not isinstance(value, np.ndarray) or value.ndim > 1 or value.dtype.kind not in "iuf":
        raise UnusableValueError(field, f"must be a vector of numbers, got {brief(value)}")
    if value.size > limits.max_state_dim:
        raise MessageTooLargeError(
            field, f"{value.size} numbers; at most {limits.max_state_dim} are allowed"
        )
    with np.errstate(over="ignore"):  # what does not fit float32 becomes infinite, and is refused
        state = np.atleast_1d(value).astype(np.float32)
    if not np.isfinite(state).all():
        raise UnusableValueError(field, "must be finite in float32, got NaN or infinity")
    return state


def _as_vector(numbers: list[object]) -> object:
    """Return a list of numbers as an array, and any other list as it is."""
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers):
        return numbers
    try:
        return np.array(numbers, dtype=np.float64)
    except OverflowError:  # an integer of hundreds of digits
        return numbers


def read_actions(value: object, field: str, num_axes: int) -> NDArray[np.float64]:
    """Return the finite actions of an answer."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
        raise UnusableValueError(field, f"not an array of numbers, but {brief(value)}")
    if value.ndim != num_axes or not np.isfinite(value).all():
        axes = "a vector" if num_axes == 1 else "[step, action_dim]"
        raise UnusableValueError(field, f"not {axes} of finite numbers, but {list(value.shape)}")
    return value.astype(np.float64)


def read_text(value: object, field: str, limits: WireLimits) -> str:
    """Return the instruction."""
    return _text(value, field, limits.max_instruction_chars)


def read_name(value: object, field: str, limits: WireLimits) -> str | None:
    """Return a short name, or None where there is none."""
    return None if value is None else _text(value, field, limits.max_name_chars)


def _text(value: object, field: str, max_chars: int) -> str:
    if not isinstance(value, str):
        raise UnusableValueError(field, f"must be text, got {brief(value)}")
    return check_text(value, field, max_chars)


def read_cameras(value: object, limits: WireLimits) -> dict[str, object]:
    """Return a map of pictures by camera, the main one among them; none is decoded yet."""
    if not isinstance(value, dict) or not value:
        raise UnusableValueError("images", f"must be a map of pictures, got {brief(value)}")
    check_camera_count(len(value), limits)
    for name in value:
        if not isinstance(name, str) or not 0 < len(name) <= 64 or not name.isprintable():
            raise UnusableValueError(
                "images", f"a camera needs a printable name, got {brief(name)}"
            )
    return value


def check_camera_count(count: int, limits: WireLimits) -> None:
    """Refuse more cameras than a main one and those that the limits allow."""
    if count > limits.max_cameras + 1:
        raise MessageTooLargeError(
            "images", f"{count} cameras; at most {limits.max_cameras + 1} are allowed"
        )


def take(fields: Mapping[str, object], name: str) -> object:
    """Return a field that must be there."""
    if name not in fields:
        raise missing(name, fields)
    return fields[name]


def missing(field: str, known: object) -> MalformedMessageError:
    """Return the complaint about a field that is not there."""
    names = ", ".join(map(str, list(known)[:12])) if isinstance(known, dict) else "nothing"
    return MalformedMessageError(field, f"missing; the message has {names or 'no fields'}")


Entries = dict[object, object]
# What marks a map as an array, and where its parts are; the last two are msgpack-numpy's.
_ARRAYS = (
    (b"__ndarray__", b"data", b"dtype", b"shape"),
    ("__ndarray__", "data", "dtype", "shape"),
    (b"nd", b"data", b"type", b"shape"),
    ("nd", "data", "type", "shape"),
)
_SCALARS: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float)}


# What msgpack raises for bytes that are not msgpack; all the rest are subclasses of these.
UNREADABLE = (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError)


def unpack(frame: bytes, limits: WireLimits = DEFAULT_LIMITS) -> object:
    """Return what a frame says, arrays rebuilt; a PNG or JPEG is an `EncodedPicture`."""
    return unpack_maps(frame, limits, partial(_revive, limits))


def unpack_maps(frame: bytes, limits: WireLimits, revive: Callable[[Entries], object]) -> object:
    """Return what a frame says, each map as `revive` makes it; lists and maps are counted."""
    check_bytes(frame, limits.max_bytes, "frame")
    count = _counter(limits)
    try:
        return msgpack.unpackb(
            frame,
            object_hook=lambda entries: revive(count(entries)),
            list_hook=count,
            ext_hook=_refuse_extension,
            max_array_len=MAX_LIST_ITEMS,
            max_map_len=MAX_MAP_ENTRIES,
        )
    except UNREADABLE as error:
        # A map key that cannot be hashed, text that is not UTF-8, nesting too deep, lengths beyond
        # the limits, or plain damage.
        raise MalformedMessageError("frame", f"not a msgpack message: {error}") from None


def _counter(limits: WireLimits) -> Callable[[SizedT], SizedT]:
    """Return a hook that refuses a frame with too many lists: each costs 60 bytes for one.

    Their entries are counted, too: a byte each on the wire, they take a second of reading.
    """
    num_lists = num_entries = 0

    def hook(items: SizedT) -> SizedT:
        nonlocal num_lists, num_entries
        num_lists += 1
        num_entries += len(items)
        if num_lists > limits.max_lists or num_entries > limits.max_entries:
            raise MessageTooLargeError(
                "frame",
                f"more than {limits.max_lists} lists and maps, or {limits.max_entries} entries",
            )
        return items

    return hook


def pack(value: object) -> bytes:
    """Return a frame in openpi's dialect."""
    return bytes(msgpack.packb(value, default=_openpi_form))


def pack_with_text_keys(value: object) -> bytes:
    """Return a frame in vla-eval's dialect."""
    return bytes(msgpack.packb(value, default=_vla_eval_form))


def _revive(limits: WireLimits, entries: Entries) -> object:
    """Return the array, scalar or picture that a marked map stands for, or the map."""
    for mark, data, dtype, shape in _ARRAYS:
        if entries.get(mark) is True:
            return build_array(entries.get(data), entries.get(dtype), entries.get(shape), "array")
    if b"__npgeneric__" in entries:
        return _scalar(entries.get(b"data"), entries.get(b"dtype"))
    if "__image__" in entries:
        return _picture(entries, limits)
    return entries


def _picture(entries: Entries, limits: WireLimits) -> object:
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
        return EncodedPicture(data)
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
