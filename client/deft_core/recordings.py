"""Episodes on disk: one append-only file per episode, readable up to its last whole step.

A file is a signature followed by records. A record is its length and checksum (both u32,
little-endian) and then a msgpack map whose `kind` is `header`, `step` or `end`. Each record is
written with a single call, so a killed process leaves at most one cut-off record behind, and
reading stops there, as it does at zeros where a disk lost what it had promised to write. Steps hold
the same bytes that cross the network, see `wire`.
"""

import errno
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from msgspec import Meta, Struct

from deft_core.errors import DeftError, WireError
from deft_core.types import ActionChunk, ActOptions, Observation
from deft_core.wire.codec import decode_answer, decode_request, encode_answer, encode_request
from deft_core.wire.formats import WireFormat, decode, encode
from deft_core.wire.images import JPEG_QUALITY, ImageEncoding
from deft_core.wire.limits import DEFAULT_LIMITS, MAX_DECODABLE_PIXELS, WireLimits
from deft_core.wire.messages import ActMessage

SUFFIX = ".deftrec"
UNRECORDED = "deft-client-ping-"  # servers record no session whose id begins so: it is noise
SIGNATURE = b"DEFTREC1"
MAX_RECORD_BYTES = 64 * 1024 * 1024
_PREFIX = struct.Struct("<II")  # length and CRC-32 of what follows
# Whatever was written can be read: only the record bounds what is in it.
_LIMITS = WireLimits(
    **{
        **dict.fromkeys(vars(DEFAULT_LIMITS), MAX_RECORD_BYTES),
        "max_image_pixels": MAX_DECODABLE_PIXELS,
    }
)


class RecordingError(DeftError):
    """A file that is not a recording, or one whose steps cannot be used; the message names it."""


class Ending(Enum):
    """How a recording ends."""

    CLOSED = "closed"  # the episode ended and its last record says so
    CUT_OFF = "cut off"  # the writer was killed, or is still writing
    DAMAGED = "damaged"  # a checksum is wrong; what comes after it is not read


class _Step(Struct, tag_field="kind", tag="step"):
    """An observation and its answer as they cross the network."""

    index: Annotated[int, Meta(ge=0)]
    at_s: float
    request: bytes
    answer: bytes


class _End(Struct, tag_field="kind", tag="end"):
    """The episode is over."""

    reason: str = ""


@dataclass(frozen=True)
class EpisodeHeader:
    """Who was driven by what, from when on."""

    session_id: str
    started_at: float  # Unix time
    policy: str = ""
    caller: str = ""  # the name of the API key, never the key
    part: int = 0  # a long episode is continued in a next file
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """One observation and how it was answered."""

    index: int
    at_s: float  # since the episode started, by a clock that never jumps
    observation: Observation
    options: ActOptions
    chunk: ActionChunk


def encode_header(header: EpisodeHeader) -> bytes:
    """Return the start of a file: signature and header record."""
    return SIGNATURE + _record({"kind": "header", **vars(header), "details": dict(header.details)})


def encode_step(
    step: RecordedStep,
    encoding: ImageEncoding = ImageEncoding.PNG,
    quality: int = JPEG_QUALITY,
) -> bytes:
    """Return one step as a record. JPEG is smaller and changes the pixels; PNG does not."""
    message = ActMessage(step.observation, step.options)
    request = encode_request(message, encoding, quality)
    return _record(_Step(step.index, step.at_s, request, encode_answer(step.chunk)))


def encode_end(reason: str) -> bytes:
    """Return the record that closes an episode."""
    return _record(_End(reason))


def find_episodes(root: Path) -> list[Path]:
    """Return the recordings under a directory (or the one file given), oldest first by name."""
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise RecordingError(f"{root}: no such recording or directory")
    return sorted(root.rglob(f"*{SUFFIX}"))


def read_header(path: Path) -> EpisodeHeader:
    """Read only the header of a recording."""
    with _opened(path) as file:
        return _read_header(file, path)


def _opened(path: Path) -> BinaryIO:
    if path.exists() and not path.is_file():
        raise RecordingError(f"{path}: is not a regular file")
    return path.open("rb")


class StepReader:
    """Iterates over a recording's steps; `ending` is known when it is exhausted."""

    def __init__(self, path: Path) -> None:
        self.ending = Ending.CUT_OFF
        self._path = path

    def __iter__(self) -> Iterator[RecordedStep]:
        with _opened(self._path) as file:
            _read_header(file, self._path)
            while not isinstance(payload := _read_payload(file), Ending):
                step = _read_step(payload, self._path)
                if step is None:
                    self.ending = Ending.CLOSED
                    return
                yield step
            self.ending = payload


def _record(entries: object) -> bytes:
    payload = encode(entries, WireFormat.MSGPACK)
    if len(payload) > MAX_RECORD_BYTES:  # nobody would read it, nor what comes after it
        raise OSError(errno.EFBIG, f"a record has {len(payload)} of {MAX_RECORD_BYTES} bytes")
    return _PREFIX.pack(len(payload), zlib.crc32(payload)) + payload


def _read_payload(file: BinaryIO) -> bytes | Ending:
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        return Ending.CUT_OFF
    length, checksum = _PREFIX.unpack(prefix)
    if not 0 < length <= MAX_RECORD_BYTES:  # no record is empty: zeros are what was never written
        return Ending.DAMAGED
    payload = file.read(length)
    if len(payload) < length:
        return Ending.CUT_OFF
    return payload if zlib.crc32(payload) == checksum else Ending.DAMAGED


def _read_header(file: BinaryIO, path: Path) -> EpisodeHeader:
    if file.read(len(SIGNATURE)) != SIGNATURE:
        raise RecordingError(f"{path}: not a recording (it does not start with {SIGNATURE!r})")
    payload = _read_payload(file)
    if isinstance(payload, Ending):
        raise RecordingError(f"{path}: the header is {payload.value}; there is nothing to read")
    try:
        return decode(payload, EpisodeHeader, WireFormat.MSGPACK, _LIMITS, "record")
    except WireError as error:
        raise RecordingError(f"{path}: the header is unusable: {error}") from error


def _read_step(payload: bytes, path: Path) -> RecordedStep | None:
    """Return the step in a record, or None where the record ends the episode."""
    kinds: Any = _Step | _End
    try:
        step = decode(payload, kinds, WireFormat.MSGPACK, _LIMITS, "record")
        if isinstance(step, _End):
            return None
        message = decode_request(step.request, limits=_LIMITS)
        chunk = decode_answer(step.answer, limits=_LIMITS)
    except WireError as error:
        raise RecordingError(f"{path}: a step is unusable: {error}") from error
    return RecordedStep(step.index, step.at_s, message.observation, message.options, chunk)
