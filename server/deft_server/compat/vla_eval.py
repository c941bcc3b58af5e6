"""Messages of AllenAI's vla-evaluation-harness: one map per frame, four fields, text keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from deft_client.errors import MalformedMessageError, UnusableValueError
from deft_server.compat.arrays import brief
from deft_server.compat.msgpack_numpy import pack_with_text_keys

PROTOCOL_VERSION = 1
_FIELDS = ("type", "payload", "seq", "timestamp")


class MessageType(Enum):
    """What a message is about."""

    HELLO = "hello"
    OBSERVATION = "observation"
    ACTION = "action"
    EPISODE_START = "episode_start"
    EPISODE_END = "episode_end"
    ERROR = "error"


_TYPES = {one.value: one for one in MessageType}


@dataclass(frozen=True)
class Message:
    """One frame. An answer carries the `seq` of what it answers."""

    type: MessageType
    payload: Mapping[str, object]
    seq: int
    timestamp: float

    def encode(self) -> bytes:
        """Return the frame."""
        return pack_with_text_keys(self.to_map())

    def to_map(self) -> dict[str, object]:
        """Return the four fields as they travel."""
        return {
            "type": self.type.value,
            "payload": self.payload,
            "seq": self.seq,
            "timestamp": self.timestamp,
        }


def looks_like_message(value: object) -> bool:
    """Tell this protocol's frames from openpi's, which have neither `type` nor `payload`."""
    return isinstance(value, dict) and "type" in value and "payload" in value


def read_message(value: object) -> Message:
    """Return an unpacked frame as a message."""
    if not isinstance(value, dict):
        raise MalformedMessageError("frame", f"must be a map, got {type(value).__name__}")
    missing = [name for name in _FIELDS if name not in value]
    if missing:
        raise MalformedMessageError(
            missing[0], f"missing; a message has the fields {', '.join(_FIELDS)}"
        )
    kind, payload, seq, timestamp = (value[name] for name in _FIELDS)
    known = _TYPES.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise UnusableValueError("type", f"must be one of {', '.join(_TYPES)}, got {brief(kind)}")
    if not isinstance(payload, dict) or not all(isinstance(name, str) for name in payload):
        raise UnusableValueError("payload", f"must be a map with text keys, got {brief(payload)}")
    if type(seq) is not int or not 0 <= seq < 2**63:
        raise UnusableValueError("seq", f"must be a count, got {brief(seq)}")
    if type(timestamp) not in (int, float):
        raise UnusableValueError("timestamp", f"must be a number, got {brief(timestamp)}")
    return Message(known, payload, seq, float(timestamp))
