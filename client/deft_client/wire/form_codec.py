"""The same request as a form (multipart/form-data), so that curl can send a picture file.

Files: `image`, and `camera.NAME` for each further camera, PNG or JPEG. Texts: `instruction`, the
options by their names, and `state` as a JSON list.
"""

from collections.abc import Mapping

from deft_client.errors import UnusableValueError
from deft_client.wire.fields import DEFAULT_LIMITS, FieldReader, WireLimits
from deft_client.wire.json_codec import JsonReader, load
from deft_client.wire.messages import ActMessage, read_request

CONTENT_TYPE = "multipart/form-data"
CAMERA_PREFIX = "camera."
_NUMBERS = {"deadline_ms": float, "radius": int, "v": int}
_FLAGS = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False, "": None}


class FormReader(JsonReader):
    """Takes fields out of a form: files are bytes already, the rest is text."""

    def binary(self, name: str) -> bytes:
        """Take the bytes of a file."""
        return FieldReader.binary(self, name)


def decode_form(
    texts: Mapping[str, str], files: Mapping[str, bytes], limits: WireLimits = DEFAULT_LIMITS
) -> ActMessage:
    """Return the request in a form, or raise `WireError`."""
    entries: dict[str, object] = {}
    for name, text in texts.items():
        if name == "image" or name.startswith(CAMERA_PREFIX):
            raise UnusableValueError(name, "must be a file; with curl: -F image=@frame.png")
        entries[name] = _value(name, text, limits)
    cameras: dict[str, object] = {}
    for name, data in files.items():
        picture = {"encoding": _encoding(data), "data": data}
        if name.startswith(CAMERA_PREFIX):
            cameras[name.removeprefix(CAMERA_PREFIX)] = picture
        else:
            entries[name] = picture
    if cameras:
        entries["cameras"] = cameras
    return read_request(FormReader(entries, limits))


def _value(name: str, text: str, limits: WireLimits) -> object:
    """Return what a text field stands for; `read_request` judges whether it may."""
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


def _encoding(data: bytes) -> str:
    """Return how to read a file: whatever it is called, its first bytes decide."""
    return "png" if data[:1] == b"\x89" else "jpeg"
