"""Takes a multipart/form-data body apart into texts and files. Pure; knows nothing of frames.

The body is in memory already, and bounded, so nothing is spooled to disk.
"""

from dataclasses import dataclass, field
from email.message import Message

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError

from deft_client.errors import MalformedMessageError, MessageTooLargeError

MAX_PARTS = 64
MAX_HEADER_BYTES = 4096  # of one part, all its headers together


@dataclass(frozen=True)
class Form:
    """What a form holds: parts with a file name are files, the others texts."""

    texts: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


def read_form(body: bytes, boundary: str) -> Form:
    """Return the parts of a form, or raise `WireError`."""
    collector = _Collector()
    callbacks = {
        "on_part_begin": collector.begin,
        "on_header_field": collector.header_name,
        "on_header_value": collector.header_value,
        "on_header_end": collector.header_end,
        "on_part_data": collector.data,
        "on_end": collector.end,
    }
    try:
        parser = MultipartParser(boundary.encode("latin-1", "replace"), callbacks)  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise MalformedMessageError("body", f"is not a multipart form: {error}") from error
    if not collector.is_complete:
        raise MalformedMessageError("body", "the multipart form is cut off")
    form = Form()
    for part in collector.parts:
        _add(form, part)
    return form


@dataclass
class _Part:
    headers: dict[str, str] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)


class _Collector:
    """Collects the parts of a form from the parser's callbacks."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.is_complete = False
        self._name = bytearray()
        self._value = bytearray()
        self._header_bytes = 0

    def begin(self) -> None:
        if len(self.parts) >= MAX_PARTS:
            raise MessageTooLargeError("body", f"more than {MAX_PARTS} parts")
        self.parts.append(_Part())
        self._header_bytes = 0

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._name += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._value += data[start:end]

    def header_end(self) -> None:
        name = self._name.decode("latin-1").lower()
        self.parts[-1].headers[name] = self._value.decode("latin-1")
        self._name.clear()
        self._value.clear()

    def data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].data += memoryview(data)[start:end]

    def end(self) -> None:
        self.is_complete = True

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            raise MessageTooLargeError(
                "body", f"a part with over {MAX_HEADER_BYTES} bytes of headers"
            )


def _add(form: Form, part: _Part) -> None:
    message = Message()
    message["content-disposition"] = part.headers.get("content-disposition", "")
    name = message.get_param("name", header="content-disposition")
    if not isinstance(name, str) or not name:
        raise MalformedMessageError("body", "a part of the form has no name")
    if name in form.texts or name in form.files:
        raise MalformedMessageError(name, "given twice")
    if message.get_filename() is None:
        form.texts[name] = part.data.decode("utf-8", "surrogateescape")
    else:
        form.files[name] = bytes(part.data)
