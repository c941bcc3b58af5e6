"""The same messages as JSON, for callers without msgpack, and what only exists as JSON.

An image is `{"encoding": "png"|"jpeg"|"raw", "data": base64, ...}` or nested lists of numbers; a
state is a list of numbers; actions are a list of lists.
"""

import base64
import binascii
import json
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from deft_client.errors import (
    MalformedMessageError,
    MessageTooLargeError,
    Problem,
    UnusableValueError,
    WireError,
)
from deft_client.types import ActionChunk, ServerInfo
from deft_client.wire.fields import DEFAULT_LIMITS, FieldReader, WireLimits
from deft_client.wire.images import JPEG_QUALITY, ImageEncoding, check_image_size
from deft_client.wire.messages import (
    ActMessage,
    Fields,
    answer_fields,
    read_answer,
    read_request,
    request_fields,
)
from deft_client.wire.msgpack_codec import check_bytes

CONTENT_TYPE = "application/json"


class JsonReader(FieldReader):
    """Takes fields out of JSON: bytes are base64, arrays may be nested lists."""

    def binary(self, name: str) -> bytes:
        """Take bytes, which JSON carries as base64."""
        value = self.take(name)
        if not isinstance(value, str):
            raise self._unusable(name, "base64 text", value)
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise UnusableValueError(self.where(name), f"is not base64: {error}") from error

    def child(self, name: str) -> FieldReader:
        """Take a map; a list of rows of pixels counts as a raw image."""
        value = self.take(name)
        if isinstance(value, list):
            pixels = _pixel_fields(value, self.where(name), self.limits)
            return FieldReader(pixels, self.limits, self.where(name))
        return self.over(value, self.where(name))

    def array(self, name: str, dtype: str, max_values: int) -> NDArray[np.generic]:
        """Take an array of numbers: one list, or a list of equally long lists."""
        value = self.take(name)
        where = self.where(name)
        if not isinstance(value, list):
            return self.over(value, where).own_array(dtype, max_values)
        rows = value if value and isinstance(value[0], list) else [value]
        if any(not isinstance(row, list) or len(row) != len(rows[0]) for row in rows):
            raise UnusableValueError(where, "must be a list of equally long lists of numbers")
        if len(rows) * len(rows[0]) > max_values:
            raise MessageTooLargeError(where, f"more than the {max_values} numbers that are taken")
        if any(type(number) not in (int, float) for number in chain.from_iterable(rows)):
            raise UnusableValueError(where, "must hold numbers only")
        return _numbers(rows if rows is value else rows[0], dtype, where)


def encode_request(
    message: ActMessage,
    encoding: ImageEncoding = ImageEncoding.PNG,
    quality: int = JPEG_QUALITY,
) -> bytes:
    """Return a request as JSON."""
    return _dump(request_fields(message, encoding, quality))


def decode_request(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> ActMessage:
    """Return the request in the JSON, or raise `WireError`."""
    return read_request(JsonReader(load(data, limits), limits))


def encode_answer(chunk: ActionChunk) -> bytes:
    """Return an answer as JSON; the actions are a list of lists."""
    return _dump({**answer_fields(chunk), "actions": chunk.actions.tolist()})


def decode_answer(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> ActionChunk:
    """Return the answer in the JSON, or raise `WireError`."""
    return read_answer(JsonReader(load(data, limits), limits))


def encode_reset(session_id: str) -> bytes:
    """Return the request that ends a session."""
    return _dump({"session_id": session_id})


def decode_reset(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> str:
    """Return the session id that a reset names, or raise `WireError`."""
    reader = JsonReader(load(data, limits), limits)
    session_id = reader.name("session_id")
    reader.finish()
    return session_id


def encode_info(info: ServerInfo) -> bytes:
    """Return what a server says about itself as JSON."""
    listed: Fields = {
        name: dict(value) if name in ("versions", "details") else value
        for name, value in vars(info).items()
    }
    return _dump(listed)


def decode_info(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> ServerInfo:
    """Return what a server says about itself; fields of later versions are passed over."""
    reader = JsonReader(load(data, limits), limits)
    most = limits.max_trace_values
    return ServerInfo(
        policy=reader.name("policy"),
        action_dim=reader.integer("action_dim", 1, most),
        chunk_length=reader.integer("chunk_length", 1, most),
        statistics_keys=reader.names("statistics_keys", most),
        default_statistics_key=reader.optional_name("default_statistics_key"),
        image_height=reader.integer("image_height", 1, limits.max_image_side),
        image_width=reader.integer("image_width", 1, limits.max_image_side),
        image_chain=reader.name("image_chain"),
        image_chains=reader.names("image_chains", most),
        decoding=reader.name("decoding"),
        decoding_methods=reader.names("decoding_methods", most),
        versions=_read_texts(reader, "versions"),
        details=_read_texts(reader, "details"),
    )


def encode_problem(problem: Problem) -> bytes:
    """Return why a request could not be answered, as application/problem+json."""
    return _dump({name: value for name, value in vars(problem).items() if value is not None})


def decode_problem(status: int, data: bytes, retry_after_s: float | None = None) -> Problem:
    """Return why a request could not be answered, whatever the body is."""
    try:
        reader = JsonReader(load(data), DEFAULT_LIMITS)
        if retry_after_s is None and reader.has("retry_after_s"):
            retry_after_s = reader.number("retry_after_s")
        return Problem(
            status=status,
            title=_said(reader, "title") or f"HTTP {status}",
            detail=_said(reader, "detail") or "",
            type=_said(reader, "type") or "about:blank",
            field=_said(reader, "field"),
            request_id=_said(reader, "request_id"),
            retry_after_s=retry_after_s,
        )
    except WireError:
        return Problem(
            status,
            f"HTTP {status}",
            data[:200].decode("utf-8", "replace"),
            retry_after_s=retry_after_s,
        )


def load(data: bytes, limits: WireLimits = DEFAULT_LIMITS, where: str = "body") -> object:
    """Return the object in the JSON, or raise `WireError` before it could grow beyond limits."""
    check_bytes(data, limits, where)
    lists = data.count(b"[") + data.count(b"{")
    if lists > limits.max_json_lists:
        raise MessageTooLargeError(
            where,
            f"{lists} lists or maps; at most {limits.max_json_lists} are taken: "
            "send images as base64",
        )
    try:
        # Bytes that are not UTF-8 become characters that no text may hold: see FieldReader.text.
        text = data.decode("utf-8", "surrogateescape")
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError(where, f"is not JSON: {error}") from error


def _dump(fields: Fields) -> bytes:
    return json.dumps(fields, default=_base64, separators=(",", ":")).encode()


def _base64(value: object) -> str:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} has no place in a message")
    return base64.b64encode(value).decode("ascii")


def _unique(pairs: list[tuple[str, object]]) -> Fields:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise MalformedMessageError("body", "the same field is given twice")
    return entries


def _numbers(rows: list[object], dtype: str, where: str) -> NDArray[np.generic]:
    try:
        values = np.array(rows, np.float64)
    except OverflowError:
        raise UnusableValueError(where, "holds a number beyond the range of float64") from None
    limit = np.finfo(dtype).max
    if np.any(np.isfinite(values) & (np.abs(values) > limit)):
        raise UnusableValueError(where, f"holds a number beyond the range of {dtype}")
    return values.astype(dtype)


def _pixel_fields(rows: list[list[list[int]]], where: str, limits: WireLimits) -> Fields:
    """Return nested lists of pixels as the map of a raw image."""
    if set(map(type, rows)) != {list} or len(set(map(len, rows))) != 1:
        raise UnusableValueError(where, "must be equally long rows of pixels")
    height, width = len(rows), len(rows[0])
    check_image_size(height, width, where, limits)
    pixels = list(chain.from_iterable(rows))
    if set(map(type, pixels)) != {list} or set(map(len, pixels)) != {3}:
        raise UnusableValueError(where, "must be [height, width, 3]")
    try:
        data = bytes(chain.from_iterable(pixels))
    except (TypeError, ValueError):
        raise UnusableValueError(where, "must hold integers from 0 to 255 only") from None
    return {"dtype": "uint8", "shape": [height, width, 3], "data": data}


def _read_texts(reader: FieldReader, name: str) -> dict[str, str]:
    if not reader.has(name):
        return {}
    child = reader.child(name)
    return {key: child.text(key, 4096) for key in child.names_left()}


def _said(reader: FieldReader, name: str) -> str | None:
    return reader.text(name, 65_536) if reader.has(name) else None
