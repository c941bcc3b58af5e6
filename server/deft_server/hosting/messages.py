"""What a server and the process of its policy say to each other: msgpack, never pickle.

Frames and memories lie in a block of shared memory as they would cross the network; a batch names
their sizes. Everything else is small and goes through a socket, length first.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from deft_client.errors import MalformedMessageError, WireError
from deft_client.types import ServerInfo
from deft_client.wire import json_codec, msgpack_codec
from deft_client.wire.fields import MAX_DECODABLE_PIXELS, WireLimits
from deft_client.wire.messages import ActMessage
from deft_policies.base import ActAnswer, ActionLimits, ActRequest
from deft_policies.errors import DeviceError, PolicyError, RequestError
from deft_policies.memory_codec import decode_memory, encode_memory
from deft_server.errors import PolicyFailedError
from deft_server.hosting.attempts import Answer, Attempts, Failure
from deft_server.hosting.frame_block import FrameBlock

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct("<I")
# The server has held every frame to its own limits before it comes here.
_MOST = 2**31 - 1
_LIMITS = WireLimits(
    max_bytes=_MOST,
    max_image_side=_MOST,
    max_image_pixels=MAX_DECODABLE_PIXELS,
    max_cameras=_MOST,
    max_instruction_chars=_MOST,
    max_name_chars=_MOST,
    max_state_dim=_MOST,
    max_action_values=_MOST,
    max_trace_values=_MOST,
    max_lists=_MOST,
    max_entries=_MOST,
)


@dataclass(frozen=True, eq=False)
class PolicyFacts:
    """What a server has to know of a policy that lives elsewhere."""

    info: ServerInfo
    limits: dict[str, ActionLimits] = field(default_factory=dict)  # by statistics key, if it tells


Message = PolicyFacts | PolicyError | Attempts


def framed(body: bytes) -> bytes:
    """Return a message with its length before it."""
    return _LENGTH.pack(len(body)) + body


def take_message(received: bytearray) -> bytes | None:
    """Cut the first whole message off what was received; None while it is not all there."""
    if len(received) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(received)
    if length > MAX_MESSAGE_BYTES:
        raise MalformedMessageError("length", f"{length} bytes; at most {MAX_MESSAGE_BYTES}")
    end = _LENGTH.size + length
    if len(received) < end:
        return None
    body = bytes(received[_LENGTH.size : end])
    del received[:end]
    return body


def write_batch(batch: Sequence[ActRequest], block: FrameBlock) -> bytes:
    """Put a batch into the block and return the message that says how it lies there."""
    parts = []
    for request in batch:
        parts.append(msgpack_codec.encode_request(ActMessage(request.observation, request.options)))
        parts.append(encode_memory(request.memory))
    block.write(parts)
    return bytes(msgpack.packb([len(part) for part in parts]))


def read_batch(body: bytes, block: FrameBlock) -> list[ActRequest]:
    """Read the batch that a message tells of."""
    parts = iter(block.read(msgpack.unpackb(body)))
    batch = []
    for frame, memory in zip(parts, parts, strict=True):
        message = msgpack_codec.decode_request(frame, _LIMITS)
        batch.append(ActRequest(message.observation, decode_memory(memory), message.options))
    return batch


def encode_message(message: Message) -> bytes:
    """Return what a policy's process has to say as bytes."""
    if isinstance(message, PolicyFacts):
        limits = {key: _pack_limits(one) for key, one in message.limits.items()}
        entries: dict[str, object] = {
            "info": json_codec.encode_info(message.info),
            "limits": limits,
        }
    elif isinstance(message, PolicyError):
        entries = {"broken": str(message)}
    else:
        entries = {
            "answers": [_pack_answer(one) for one in message.answers],
            "failures": [one.value for one in message.failures],
            "service_s": message.service_s,
        }
    return bytes(msgpack.packb(entries))


def decode_message(body: bytes) -> Message:
    """Return what a policy's process has said, or raise `WireError`."""
    try:
        entries = msgpack.unpackb(body)
        if "broken" in entries:
            return PolicyError(str(entries["broken"]))
        if "info" in entries:
            limits = {key: _unpack_limits(one) for key, one in entries["limits"].items()}
            return PolicyFacts(json_codec.decode_info(entries["info"], _LIMITS), limits)
        return Attempts(
            [_unpack_answer(*one) for one in entries["answers"]],
            [Failure(one) for one in entries["failures"]],
            float(entries["service_s"]),
        )
    except WireError:
        raise
    except (*msgpack_codec.UNREADABLE, KeyError, AttributeError) as error:
        raise MalformedMessageError("body", f"is no message of a policy: {error}") from error


def _pack_answer(answer: Answer) -> list[Any]:
    """Kind, then what it takes to build the answer again."""
    if isinstance(answer, ActAnswer):
        return ["chunk", msgpack_codec.encode_answer(answer.chunk), encode_memory(answer.memory)]
    if isinstance(answer, RequestError):
        return ["request", str(answer), answer.field]
    kind = "device" if isinstance(answer, DeviceError) else "failed"
    return [kind, str(answer), ""]


def _unpack_answer(kind: str, first: Any, second: Any) -> Answer:
    if kind == "chunk":
        return ActAnswer(msgpack_codec.decode_answer(first, _LIMITS), decode_memory(second))
    if kind == "request":
        return RequestError(second, first)
    return DeviceError(first) if kind == "device" else PolicyFailedError(first)


def _pack_limits(limits: ActionLimits) -> list[bytes]:
    rows = (limits.low, limits.high, limits.is_motion)
    return [*(row.tobytes() for row in rows), bytes([limits.may_exceed])]


def _unpack_limits(packed: Sequence[bytes]) -> ActionLimits:
    low, high, is_motion, may_exceed = packed
    moves: NDArray[np.bool_] = np.frombuffer(is_motion, np.bool_)
    return ActionLimits(np.frombuffer(low), np.frombuffer(high), moves, may_exceed == b"\x01")
