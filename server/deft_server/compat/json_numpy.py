"""JSON that carries arrays as `{"__numpy__": base64, "dtype": ..., "shape": [...]}` at any depth.

This is what OpenVLA's and OpenVLA-OFT's own clients speak. A scalar has an empty shape.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pybase64
from numpy.typing import NDArray

from deft_client.errors import MalformedMessageError, MessageTooLargeError
from deft_client.wire.fields import DEFAULT_LIMITS, WireLimits
from deft_server.compat.frames import build_array

_MARKER = "__numpy__"
_ENCODED = "encoded"


@dataclass(frozen=True)
class ActBody:
    """The fields of a request, and whether it came as JSON within JSON (so must the reply)."""

    fields: Mapping[str, object]
    is_encoded: bool


class NotJsonError(MalformedMessageError):
    """Not JSON. `position` is where reading stopped, `reason` what the parser said."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__("body", f"not JSON: {reason} at character {position}")
        self.reason = reason
        self.position = position


class NotAnObjectError(MalformedMessageError):
    """JSON, but not an object with fields."""

    def __init__(self, value: object) -> None:
        super().__init__("body", f"must be a JSON object, got {type(value).__name__}")
        self.value = value


def decode_json(body: bytes | str, limits: WireLimits = DEFAULT_LIMITS) -> object:
    """Return what JSON says, arrays rebuilt."""
    # Counting takes time, and a body with fewer characters than that cannot have more lists.
    opened = _count_opened(body) if len(body) > limits.max_json_lists else 0
    if len(body) > limits.max_bytes or opened > limits.max_json_lists:
        raise MessageTooLargeError(
            "body",
            f"{len(body)} bytes and {opened} lists or objects; at most {limits.max_bytes} "
            f"and {limits.max_json_lists} are taken: send the image as an array",
        )
    try:
        return json.loads(body, object_hook=_revive)
    except json.JSONDecodeError as error:
        raise NotJsonError(error.msg, error.pos) from None
    except RecursionError:
        raise NotJsonError("nested too deeply", 0) from None
    except ValueError as error:  # undecodable text, an integer of thousands of digits
        raise NotJsonError(str(error), 0) from None


def decode_act_body(body: bytes, limits: WireLimits = DEFAULT_LIMITS) -> ActBody:
    """Read the body of `POST /act` in its plain or its double-encoded form."""
    outer = decode_json(body, limits)
    if not isinstance(outer, dict):
        raise NotAnObjectError(outer)
    if _ENCODED not in outer:
        return ActBody(outer, is_encoded=False)
    text = outer[_ENCODED]
    if len(outer) != 1 or not isinstance(text, str):
        raise MalformedMessageError(_ENCODED, "must be the only field, and hold JSON as text")
    inner = decode_json(text, limits)
    if not isinstance(inner, dict):
        raise MalformedMessageError(_ENCODED, f"must hold an object, got {type(inner).__name__}")
    return ActBody(inner, is_encoded=True)


def encode_reply(value: NDArray[np.float64] | list[NDArray[np.float64]], is_encoded: bool) -> bytes:
    """Return the body of a successful reply, byte for byte as the peer's server writes it."""
    if is_encoded:
        return json.dumps(json.dumps(_plain(value))).encode()
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def _plain(value: NDArray[np.float64] | list[NDArray[np.float64]]) -> object:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return {
        _MARKER: base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(),
        "dtype": value.dtype.str,
        "shape": list(value.shape),
    }


def _count_opened(body: bytes | str) -> int:
    if isinstance(body, str):
        return body.count("[") + body.count("{")
    return body.count(b"[") + body.count(b"{")


def _revive(fields: dict[str, object]) -> object:
    if _MARKER not in fields:
        return fields
    text = fields[_MARKER]
    if not isinstance(text, str):
        raise MalformedMessageError(_MARKER, f"must be base64 text, got {type(text).__name__}")
    return build_array(_binary(text), fields.get("dtype"), fields.get("shape"), _MARKER)


def _binary(text: str) -> bytes:
    """Return what base64 says.

    Characters that are not of the alphabet are skipped, as the peer does; what is left must still
    be exactly as long as the shape says. The strict decoder is thirty times quicker.
    """
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError:
        pass
    try:
        return binascii.a2b_base64(text)
    except ValueError as error:  # wrong padding, or not ASCII
        raise MalformedMessageError(_MARKER, f"not base64: {error}") from None
