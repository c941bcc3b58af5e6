"""Arrays as the peers' protocols carry them: bytes, a dtype and a shape, none of them trusted.

Only plain numbers are built. Object, void, string and complex dtypes never reach numpy, and a shape
is compared with the bytes that are really there before anything is allocated.
"""

from itertools import chain, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from deft_client.errors import MalformedMessageError, UnusableValueError

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
