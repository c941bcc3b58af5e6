"""The same request as a form (multipart/form-data), so that curl can send a picture file.

Files: `image`, and `camera.NAME` for each further camera, PNG or JPEG. Texts: `instruction`, the
options by their names, and `state` as a JSON list.
"""

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser

from deft_client.errors import MalformedMessageError, MessageTooLargeError, UnusableValueError
from deft_client.wire.fields import DEFAULT_LIMITS, Terms, WireLimits
from deft_client.wire.json_codec import load
from deft_client.wire.messages import REQUEST, ActMessage

CONTENT_TYPE = "multipart/form-data"
CAMERA_PREFIX = "camera."
MAX_PARTS = 64
_NUMBERS = {"deadline_ms": float, "radius": int, "v": int}
_FLAGS = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False, "": None}


def decode_form(body: bytes, boundary: str, limits: WireLimits = DEFAULT_LIMITS) -> ActMessage:
    """Return the request in a form, or raise `WireError`."""
    entries: dict[str, object] = {}
    cameras: dict[str, object] = {}
    for name, value in read_parts(body, boundary).items():
        if name.startswith(CAMERA_PREFIX):
            cameras[name.removeprefix(CAMERA_PREFIX)] = _picture(name, value)
        elif isinstance(value, bytes) or name == "image":
            entries[name] = _picture(name, value)
        else:
            entries[name] = _option(name, value, limits)
    # Bytes are bytes here, but the state is a JSON list.
    return REQUEST.read({**entries, "cameras": cameras or None}, "", Terms(limits, is_json=True))


def read_parts(body: bytes, boundary: str) -> dict[str, str | bytes]:
    """Return the parts of a form, those with a file name as bytes; the library bounds headers."""
    parts: list[Field | File] = []
    ends: list[bool] = []

    def keep(part: Field | File) -> None:
        if len(parts) >= MAX_PARTS:
            raise MessageTooLargeError("body", f"more than {MAX_PARTS} parts")
        parts.append(part)

    # The body is in memory already, and bounded, so that nothing needs to go to disk.
    config = {"MAX_MEMORY_FILE_SIZE": len(body)}
    try:
        parser = FormParser(
            CONTENT_TYPE, keep, keep, lambda: ends.append(True), boundary, config=config
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise MalformedMessageError("body", f"is not a multipart form: {error}") from error
    if not ends:
        raise MalformedMessageError("body", "the multipart form is cut off")
    values: dict[str, str | bytes] = {}
    for part in parts:
        name = (part.field_name or b"").decode("utf-8", "replace")
        if name in values:
            raise MalformedMessageError(name, "given twice")
        values[name] = _value(part)
    return values


def _value(part: Field | File) -> str | bytes:
    if isinstance(part, Field):
        return (part.value or b"").decode("utf-8", "surrogateescape")
    part.file_object.seek(0)
    return part.file_object.read()


def _picture(name: str, data: str | bytes) -> object:
    """Return a file as the map of an image; whatever it is called, its first bytes decide."""
    if isinstance(data, str):
        raise UnusableValueError(name, "must be a file; with curl: -F image=@frame.png")
    return {"encoding": "png" if data[:1] == b"\x89" else "jpeg", "data": data}


def _option(name: str, text: str, limits: WireLimits) -> object:
    """Return what a text field stands for; `REQUEST` judges whether it may."""
    if name == "state":
        return load(text.encode("utf-8", "surrogateescape"), limits, name)
    if name == "trace":
        if text.lower() not in _FLAGS:
            raise UnusableValueError(name, f"must be true or false, got {text[:24]!r}")
        return _FLAGS[text.lower()]
    if name in _NUMBERS and text:
        try:
            return _NUMBERS[name](text)
        except ValueError:
            raise UnusableValueError(name, f"must be a number, got {text[:24]!r}") from None
    return text or None
