"""The body of POST /v1/act in the three forms it may have, and the answer in the two it may take.

Pure functions over bytes. What is in a message, and its limits, is the wire's business.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError

from deft_client import wire, wire_json
from deft_client.errors import (
    MalformedMessageError,
    MessageTooLargeError,
    UnsupportedMessageError,
    UnusableValueError,
)
from deft_client.images import decode_image
from deft_client.types import ActionChunk, Observation
from deft_client.wire_limits import WireLimits
from deft_client.wire_messages import (
    ActMessage,
    check_camera_names,
    read_options,
    read_state,
    read_version,
)

MULTIPART = "multipart/form-data"
CAMERA_PREFIX = "camera."
MAX_PART_HEADER_BYTES = 4096
_NOT_TEXT = ("deadline_ms", "radius", "trace", "state", "v")  # JSON in a form field


def decode_body(content_type: str, body: bytes, limits: WireLimits) -> ActMessage:
    """Return the frame in a body, or raise `WireError`."""
    header = Message()
    header["content-type"] = content_type
    kind = header.get_content_type() if content_type else "none"
    if kind == wire.CONTENT_TYPE:
        return wire.decode_request(body, limits)
    if kind == wire_json.CONTENT_TYPE:
        return wire_json.decode_request(body, limits)
    if kind == MULTIPART:
        boundary = header.get_param("boundary")
        if not isinstance(boundary, str) or not boundary:
            raise MalformedMessageError("content-type", "multipart/form-data names no boundary")
        return _from_form(_parse_form(body, boundary, limits), limits)
    raise UnsupportedMessageError(
        "content-type",
        f"must be {wire.CONTENT_TYPE}, {wire_json.CONTENT_TYPE} or {MULTIPART}, "
        f"got {content_type[:80]!r}",
    )


def is_quick(content_type: str, body: bytes) -> bool:
    """Is a body decoded in well under a millisecond, because its pixels are raw?

    May say no where yes would do, and then costs a thread switch; never the reverse.
    """
    return content_type == wire.CONTENT_TYPE and b"png" not in body and b"jpeg" not in body


def wants_msgpack(accept: str, content_type: str) -> bool:
    """Should the answer be msgpack? It is JSON otherwise."""
    if wire.CONTENT_TYPE in accept:
        return True
    return content_type == wire.CONTENT_TYPE and wire_json.CONTENT_TYPE not in accept


def encode_answer(chunk: ActionChunk, as_msgpack: bool) -> tuple[bytes, str]:
    """Return an answer as bytes, and their content type."""
    if as_msgpack:
        return wire.encode_answer(chunk), wire.CONTENT_TYPE
    return wire_json.encode_answer(chunk), wire_json.CONTENT_TYPE


@dataclass
class _Part:
    headers: dict[str, str] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)

    @property
    def name(self) -> str:
        message = Message()
        message["content-disposition"] = self.headers.get("content-disposition", "")
        name = message.get_param("name", header="content-disposition")
        if not isinstance(name, str) or not name:
            raise MalformedMessageError("body", "a part of the form has no name")
        return name


class _Collector:
    """Collects the parts of a form from the parser's callbacks."""

    def __init__(self, max_parts: int) -> None:
        self.parts: list[_Part] = []
        self.is_complete = False
        self._max_parts = max_parts
        self._name = bytearray()
        self._value = bytearray()

    def begin(self) -> None:
        if len(self.parts) >= self._max_parts:
            raise MessageTooLargeError("body", f"more than {self._max_parts} parts")
        self.parts.append(_Part())

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]
        self._check_header()

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_header()

    def header_end(self) -> None:
        name = self._name.decode("latin-1").lower()
        self.parts[-1].headers[name] = self._value.decode("utf-8", "replace")
        self._name.clear()
        self._value.clear()

    def data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].data += memoryview(data)[start:end]

    def end(self) -> None:
        self.is_complete = True

    def _check_header(self) -> None:
        if len(self._name) + len(self._value) > MAX_PART_HEADER_BYTES:
            raise MessageTooLargeError("body", "a part's header is too long")


def _parse_form(body: bytes, boundary: str, limits: WireLimits) -> dict[str, bytes]:
    wire.check_bytes(body, limits)
    collector = _Collector(max_parts=16 + limits.max_cameras)
    parser = MultipartParser(
        boundary.encode("latin-1", "replace"),
        {
            "on_part_begin": collector.begin,
            "on_header_field": collector.header_name,
            "on_header_value": collector.header_value,
            "on_header_end": collector.header_end,
            "on_part_data": collector.data,
            "on_end": collector.end,
        },
    )
    try:
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise MalformedMessageError("body", f"is not a multipart form: {error}") from error
    if not collector.is_complete:
        raise MalformedMessageError("body", "the multipart form is cut off")
    form: dict[str, bytes] = {}
    for part in collector.parts:
        if part.name in form:
            raise MalformedMessageError(part.name, "given twice")
        form[part.name] = bytes(part.data)
    return form


def _from_form(form: Mapping[str, bytes], limits: WireLimits) -> ActMessage:
    files = {name: data for name, data in form.items() if _is_file(name)}
    reader = wire_json.JsonReader(
        {name: _field(name, data) for name, data in form.items() if name not in files}, limits
    )
    read_version(reader)
    options = read_options(reader)
    instruction = reader.text("instruction", limits.max_instruction_chars)
    state = read_state(reader) if reader.has("state") else None
    reader.finish()
    if "image" not in files:
        raise MalformedMessageError("image", "missing; send a PNG or JPEG file under this name")
    cameras = {
        name.removeprefix(CAMERA_PREFIX): data for name, data in files.items() if name != "image"
    }
    check_camera_names(list(cameras), limits)
    image = decode_image(files["image"], "image", limits)
    views = {
        name: decode_image(data, f"{CAMERA_PREFIX}{name}", limits) for name, data in cameras.items()
    }
    return ActMessage(Observation(image, instruction, views, state), options)


def _is_file(name: str) -> bool:
    return name == "image" or name.startswith(CAMERA_PREFIX)


def _field(name: str, data: bytes) -> object:
    if name not in _NOT_TEXT:
        return data.decode("utf-8", "surrogateescape")
    try:
        value: object = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnusableValueError(
            name, f"must be a number, true, false or a list: {error}"
        ) from None
    return value
