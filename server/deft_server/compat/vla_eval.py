"""vla-eval's messages: four fields around a payload, and what an observation's payload holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from msgspec import Meta

from deft_core.peers.arrays import (
    pack_with_text_keys,
    read_cameras,
    read_frames,
    read_state,
    read_text,
    take,
)
from deft_core.types import Observation
from deft_core.wire.formats import convert
from deft_core.wire.limits import ReadContext
from deft_core.wire.messages import ActMessage

PROTOCOL_VERSION = 1


class MessageType(Enum):
    """What a message is about."""

    HELLO = "hello"
    OBSERVATION = "observation"
    ACTION = "action"
    EPISODE_START = "episode_start"
    EPISODE_END = "episode_end"
    ERROR = "error"


@dataclass(frozen=True)
class Message:
    """One frame. An answer carries the `seq` of what it answers."""

    type: MessageType
    payload: dict[str, object]
    seq: Annotated[int, Meta(ge=0)]
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
    """Return an unpacked frame as a message, or raise `WireError`."""
    return convert(value, Message, name="frame")


def vla_eval_request(payload: Mapping[str, object], context: ReadContext) -> ActMessage:
    """Read an observation of the vla-eval harness: named images, the first or `agentview` leads."""
    limits = context.limits
    images = read_cameras(take(payload, "images"), limits)
    pictures = read_frames([("images", one) for one in images.values()], context)
    frames = dict(zip(images, pictures, strict=True))
    main = "agentview" if "agentview" in frames else next(iter(frames))
    image = frames.pop(main)
    text = read_text(take(payload, "task_description"), "task_description", limits)
    state = read_state(payload["states"], "states", limits) if "states" in payload else None
    return ActMessage(Observation(image, text, frames, state))
