"""The messages between a robot and a server as they travel, the same in JSON and in msgpack.

The server's OpenAPI document is made of them, of `ServerInfo` and of `Problem`. Fields that are
null are left out. A request with unknown fields is refused, because a misspelt option must not be
ignored; an answer may have fields of later versions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from deft_core.errors import WireError
from deft_core.types import ActOptions, DecodeTrace, Intervention, LogProbs, Observation

VERSION: Literal[1] = 1
MAX_RADIUS = 65_535  # bins; policies set their own, lower bounds
MAX_EXECUTED = 65_535  # steps of one answer
MAX_TOKENS = 65_535  # of one answer; policies set their own, lower bounds
MAX_DEADLINE_MS = 24 * 3600 * 1000

# Longer lists and maps are refused by their headers; `WireLimits` are judged when all is read.
Shape = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=8)]
State = Annotated[list[float], Meta(max_length=65_536)]
Rows = Annotated[list[list[float]], Meta(max_length=65_536)]


class Array(Struct, kw_only=True, forbid_unknown_fields=True):
    """Numbers as bytes, little-endian, row by row."""

    dtype: Literal["float32", "float64"]
    shape: Shape
    data: bytes


class Picture(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A camera frame: a PNG or JPEG file, or raw pixels with dtype and shape."""

    encoding: Literal["raw", "png", "jpeg"] | None = None  # null: raw
    dtype: Literal["uint8"] | None = None
    shape: Shape | None = None  # [height, width, 3]
    data: bytes


class ActRequest(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One observation, and how it is to be answered, as it travels: pictures are still bytes.

    `ActMessage` is the same after decoding, with pictures and state as arrays.
    """

    v: Literal[1] | None = None
    id: str | None = None  # the answer repeats it
    image: Picture
    instruction: str
    session_id: str | None = None
    deadline_ms: Annotated[float, Meta(gt=0, le=MAX_DEADLINE_MS)] | None = None
    statistics_key: str | None = None
    decoding: str | None = None
    radius: Annotated[int, Meta(ge=0, le=MAX_RADIUS)] | None = None
    trace: bool | None = None
    reasoning: bool | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    log_probs: bool | None = None
    executed_steps: Annotated[int, Meta(ge=0, le=MAX_EXECUTED)] | None = None
    notes: bool | None = None
    state: Array | State | None = None  # float32
    cameras: Annotated[dict[str, Picture], Meta(max_length=1024)] | None = None


class ActRequests(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Several observations as they travel: an `ActRequest` each, of a session of its own."""

    v: Literal[1] | None = None
    id: str | None = None
    observations: Annotated[list[Raw], Meta(min_length=1, max_length=1024)]


class ActAnswer(Struct, kw_only=True, omit_defaults=True):
    """The actions that follow an observation, and what was asked for besides."""

    v: Literal[1] | None = None
    id: str | None = None
    actions: Array | Rows  # float64 [step, action_dim]; rows in JSON
    timings: dict[str, float] | None = None  # those of `StageTimings` that are not 0
    trace: DecodeTrace | None = None
    intervention: Intervention | None = None
    reasoning: str | None = None
    log_probs: LogProbs | None = None
    notes: tuple[str, ...] = ()


class ActAnswers(Struct, kw_only=True, omit_defaults=True):
    """The answers to several observations, in their order: an `ActAnswer` or a `Problem` each."""

    v: Literal[1] | None = None
    id: str | None = None
    answers: Annotated[list[Raw], Meta(max_length=1024)]


class Reset(Struct, forbid_unknown_fields=True):
    """An episode of a session starts."""

    session_id: str


class Envelope(Struct):
    """What tells messages apart; their other fields are passed over."""

    id: str | None = None
    actions: Raw | UnsetType = UNSET


@dataclass(frozen=True, eq=False)
class ActMessage:
    """A decoded `ActRequest`: what the client encodes, and what the server works with.

    The answer repeats `id`: where answers could be mixed up, the caller tells by it which is which.
    """

    observation: Observation
    options: ActOptions = field(default_factory=ActOptions)
    id: str | None = None


@dataclass(frozen=True, eq=False)
class ActMessages:
    """A decoded `ActRequests`: several observations, each of a session of its own.

    One that cannot be used stands in its place as the error it is: the others are answered.
    """

    each: Sequence[ActMessage | WireError]
    id: str | None = None
