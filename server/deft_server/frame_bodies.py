"""The body of POST /v1/act in the three forms it may have, and the answer in the two it may take.

Pure functions over bytes. What is in a message, and its limits, is the wire's business.
"""

from email.message import Message

from deft_client import wire, wire_form, wire_json
from deft_client.errors import MalformedMessageError, UnsupportedMessageError
from deft_client.types import ActionChunk
from deft_client.wire import ActMessage
from deft_client.wire_limits import WireLimits
from deft_server.forms import read_form

_CONTENT_TYPES = (wire.CONTENT_TYPE, wire_json.CONTENT_TYPE, wire_form.CONTENT_TYPE)


def decode_body(content_type: str, body: bytes, limits: WireLimits) -> ActMessage:
    """Return the frame in a body, or raise `WireError`."""
    header = Message()
    header["content-type"] = content_type or "none/none"
    kind = header.get_content_type()
    if kind == wire.CONTENT_TYPE:
        return wire.decode_request(body, limits)
    if kind == wire_json.CONTENT_TYPE:
        return wire_json.decode_request(body, limits)
    if kind != wire_form.CONTENT_TYPE:
        raise UnsupportedMessageError(
            "content-type", f"must be one of {', '.join(_CONTENT_TYPES)}; got {content_type[:80]!r}"
        )
    wire.check_bytes(body, limits)
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not boundary:
        raise MalformedMessageError("content-type", "multipart/form-data names no boundary")
    form = read_form(body, boundary)
    return wire_form.decode_form(form.texts, form.files, limits)


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
