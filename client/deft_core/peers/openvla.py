"""The messages of OpenVLA's and OpenVLA-OFT's own clients and servers, for both sides.

They are JSON that carries arrays as `{"__numpy__": base64, "dtype": ..., "shape": [...]}` at any
depth; a scalar has an empty shape. Whether a frame is already rotated or cropped is the matter of
profiles.
"""

import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deft_core.errors import MalformedMessageError, MessageTooLargeError, UnusableValueError
from deft_core.peers.arrays import (
    build_array,
    check_camera_count,
    read_actions,
    read_frame,
    read_name,
    read_state,
    read_text,
    take,
)
from deft_core.types import ActOptions, Image, Observation
from deft_core.wire.formats import check_json, decode_base64
from deft_core.wire.limits import DEFAULT_LIMITS, ReadContext, WireLimits
from deft_core.wire.messages import ActMessage
from deft_core.wire.refusals import brief

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
    if len(body) > limits.max_bytes:
        raise MessageTooLargeError(
            "body", f"{len(body)} bytes; at most {limits.max_bytes} are allowed"
        )
    check_json(body, limits)
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
        raise MalformedMessageError(_ENCODED, f"must hold an object, got {brief(inner)}")
    return ActBody(inner, is_encoded=True)


def encode_array(array: NDArray[np.generic]) -> dict[str, object]:
    """Return an array as it travels."""
    content = np.ascontiguousarray(array)
    return {
        _MARKER: binascii.b2a_base64(content.tobytes(), newline=False).decode(),
        "dtype": content.dtype.str,
        "shape": list(array.shape),
    }


def encode_reply(value: NDArray[np.float64] | list[NDArray[np.float64]], is_encoded: bool) -> bytes:
    """Return the body of a successful reply, byte for byte as the peer's server writes it."""
    plain = [encode_array(one) for one in value] if isinstance(value, list) else encode_array(value)
    if is_encoded:
        return json.dumps(json.dumps(plain)).encode()
    return json.dumps(plain, separators=(",", ":")).encode()


def openvla_request(fields: Mapping[str, object], context: ReadContext) -> ActMessage:
    """Read what OpenVLA's `deploy.py` takes; unknown fields are ignored, as there."""
    limits = context.limits
    image = read_frame(take(fields, "image"), "image", context)
    instruction = read_text(take(fields, "instruction"), "instruction", limits)
    key = read_name(fields.get("unnorm_key"), "unnorm_key", limits)
    return ActMessage(Observation(image, instruction), ActOptions(statistics_key=key))


def openvla_fields(
    observation: Observation, statistics_key: str | None = None
) -> dict[str, object]:
    """Return an observation as OpenVLA's server takes it."""
    key = {} if statistics_key is None else {"unnorm_key": statistics_key}
    image = encode_array(observation.image)
    return {"image": image, "instruction": observation.instruction, **key}


def oft_request(fields: Mapping[str, object], context: ReadContext) -> ActMessage:
    """Read what OpenVLA-OFT's server takes: every field with `wrist` in its name is a camera."""
    limits = context.limits
    image = _read_colour_frame(take(fields, "full_image"), "full_image", context)
    instruction = read_text(take(fields, "instruction"), "instruction", limits)
    wrists = [name for name in fields if "wrist" in name]
    check_camera_count(len(wrists), limits)
    cameras = {name: _read_colour_frame(fields[name], name, context) for name in wrists}
    state = read_state(fields["state"], "state", limits) if "state" in fields else None
    return ActMessage(Observation(image, instruction, cameras, state))


def _read_colour_frame(value: object, field: str, context: ReadContext) -> Image:
    """Return a picture with three channels: OFT's server, unlike OpenVLA's, takes no others."""
    image = read_frame(value, field, context)
    if image is not value:
        assert isinstance(value, np.ndarray)  # nothing else is read as a picture
        found = list(value.shape)
        raise UnusableValueError(field, f"must be uint8 [height, width, 3], got {found}")
    return image


def oft_fields(observation: Observation) -> dict[str, object]:
    """Return an observation as OpenVLA-OFT's server takes it."""
    fields: dict[str, object] = {"full_image": encode_array(observation.image)}
    for name, image in observation.cameras.items():
        fields[f"{name}_image"] = encode_array(image)
    if observation.state is not None:
        fields["state"] = encode_array(observation.state.astype(np.float64))
    fields["instruction"] = observation.instruction
    return fields


def read_answer(answer: object) -> NDArray[np.float64]:
    """Return the actions [step, action_dim] of a decoded answer: one, or a list of them."""
    listed = answer if isinstance(answer, list) and answer else [answer]
    actions = [read_actions(one, "action", num_axes=1) for one in listed]
    if len({len(one) for one in actions}) != 1:
        raise UnusableValueError("action", "the actions of an answer differ in length")
    return np.stack(actions)


def _revive(fields: dict[str, object]) -> object:
    if _MARKER not in fields:
        return fields
    text = fields[_MARKER]
    if not isinstance(text, str):
        raise MalformedMessageError(_MARKER, f"must be base64 text, got {brief(text)}")
    return build_array(_binary(text), fields.get("dtype"), fields.get("shape"), _MARKER)


def _binary(text: str) -> bytes:
    """Return what base64 says.

    Characters that are not of the alphabet are skipped, as the peer does; what is left must still
    be exactly as long as the shape says. The strict decoder is thirty times quicker.
    """
    try:
        return decode_base64(text)
    except ValueError:
        pass
    try:
        return binascii.a2b_base64(text)
    except ValueError as error:  # wrong padding, or not ASCII
        raise MalformedMessageError(_MARKER, f"not base64: {error}") from None
