"""Arrays in messages. Their shape is checked against their bytes before anything is built."""

import math
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_client.errors import MessageTooLargeError, UnusableValueError
from deft_client.wire.fields import (
    BINARY,
    Json,
    Kind,
    Limit,
    Terms,
    WireLimits,
    brief,
    constant,
    record,
)

MAX_AXES = 8


def array(
    dtype: str, axes: tuple[str, ...], max_values: Limit, is_finite: bool = False
) -> Kind[NDArray[Any]]:
    """Return the kind of an array: `{dtype, shape, data}`, in JSON also one list or one of rows."""
    parts = array_parts(dtype, max_values)

    def read(value: object, where: str, terms: Terms) -> NDArray[Any]:
        if terms.is_json and isinstance(value, list):
            values = _read_rows(value, dtype, max_values(terms.limits), where)
        else:
            values = parts.read(value, where, terms)
        if values.ndim != len(axes):
            shape = list(values.shape)
            raise UnusableValueError(where, f"must be [{', '.join(axes)}], got {shape}")
        if is_finite and not np.isfinite(values).all():
            raise UnusableValueError(where, "must be finite, got NaN or infinity")
        return values

    def schema(limits: WireLimits) -> Json:
        told: Json = {"type": "number"}
        for _ in axes:
            told = {"type": "array", "items": told, "maxItems": max_values(limits)}
        return told

    return Kind(read, schema)


def array_parts(dtype: str, max_values: Limit) -> Kind[NDArray[Any]]:
    """Return the kind of an array of any number of axes as `{dtype, shape, data}`; read-only."""
    layout = np.dtype(dtype).newbyteorder("<")

    def limited_shape(value: object, where: str, terms: Terms) -> list[int]:
        shape, most = read_shape(value, where), max_values(terms.limits)
        if math.prod(shape) > most:
            raise MessageTooLargeError(where, f"{shape} is beyond the {most} values that are taken")
        return shape

    kinds: dict[str, Kind[Any]] = {
        "dtype": constant(dtype),
        "shape": Kind(limited_shape, lambda limits: {"type": "array", "items": _COUNT}),
        "data": BINARY,
    }
    parts: Kind[Json] = record(dict, kinds)

    def read(value: object, where: str, terms: Terms) -> NDArray[Any]:
        found = parts.read(value, where, terms)
        return array_over(found["data"], layout, found["shape"], f"{where}.data")

    return Kind(read, parts.schema)


_COUNT: Json = {"type": "integer", "minimum": 0}


def read_shape(value: object, where: str) -> list[int]:
    """Return a shape whose entries are counts."""
    if not isinstance(value, list) or len(value) > MAX_AXES:
        raise UnusableValueError(
            where, f"must be a list of at most {MAX_AXES} counts, got {brief(value)}"
        )
    if not all(type(length) is int and length >= 0 for length in value):
        raise UnusableValueError(
            where, f"must hold counts only, got {', '.join(map(brief, value))}"
        )
    return value


def array_over(data: bytes, dtype: np.dtype[Any], shape: list[int], where: str) -> NDArray[Any]:
    """Return a read-only array over bytes that must match dtype and shape exactly."""
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise UnusableValueError(
            where, f"{len(data)} bytes; {shape} of {dtype.name} takes {expected}"
        )
    return np.frombuffer(data, dtype).reshape(shape)


def _read_rows(value: list[Any], dtype: str, most: int, where: str) -> NDArray[Any]:
    rows = value if value and isinstance(value[0], list) else [value]
    if any(not isinstance(row, list) or len(row) != len(rows[0]) for row in rows):
        raise UnusableValueError(where, "must be a list of equally long lists of numbers")
    if len(rows) * len(rows[0]) > most:
        raise MessageTooLargeError(where, f"more than the {most} numbers that are taken")
    if any(type(one) not in (int, float) for one in chain.from_iterable(rows)):
        raise UnusableValueError(where, "must hold numbers only")
    try:
        values = np.array(value, np.float64)
    except OverflowError:
        raise UnusableValueError(where, "holds a number beyond the range of float64") from None
    if np.any(np.isfinite(values) & (np.abs(values) > np.finfo(dtype).max)):
        raise UnusableValueError(where, f"holds a number beyond the range of {dtype}")
    return values.astype(dtype)
