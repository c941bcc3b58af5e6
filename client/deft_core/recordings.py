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
from typing import Any, BinaryIO

import msgpack

from deft_core.errors import DeftError, WireError
from deft_core.types import ActionChunk, ActOptions, Observation
from deft_core.wire.fields import (
    BINARY,
    DEFAULT_LIMITS,
    MAX_DECODABLE_PIXELS,
    Json,
    Kind,
    ReadContext,
    WireLimits,
    as_map,
    constant,
    number,
    record,
    record_of,
    whole,
)
from deft_core.wire.images import JPEG_QUALITY, ImageEncoding
from deft_core.wire.messages import ActMessage
from deft_core.wire.msgpack_codec import (
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)

SUFFIX = ".deftrec"
SIGNATURE = b"DEFTREC1"
MAX_RECORD_BYTES = 64 * 1024 * 1024
_PREFIX = struct.Struct("<II")  # length and CRC-32 of what follows
# Whatever was written can be read: only the record bounds what is in it.
_LIMITS = WireLimits(
    **{
        **dict.fromkeys(vars(DEFAULT_LIMITS), MAX_RECORD_BYTES),
        "max_image_pixels": MAX_DECODABLE_PIXELS,
        "max_lists": DEFAULT_LIMITS.max_lists,  # the only ones larger in memory than on disk
    }
)


class RecordingError(DeftError):
    """A file that is not a recording, or one whose steps cannot be used; the message names it."""


class Ending(Enum):
    """How a recording ends."""

    CLOSED = "closed"  # the episode ended and its last record says so
    CUT_OFF = "cut off"  # the writer was killed, or is still writing
    DAMAGED = "damaged"  # a checksum is wrong; what comes after it is not read


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
    return _record(
        {
            "kind": "step",
            "index": step.index,
            "at_s": step.at_s,
            "request": encode_request(message, encoding, quality),
            "answer": encode_answer(step.chunk),
        }
    )


def encode_end(reason: str) -> bytes:
    """Return the record that closes an episode."""
    return _record({"kind": "end", "reason": reason})


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
                step = _read_step(_entries(payload, self._path), self._path)
                if step is None:
                    self.ending = Ending.CLOSED
                    return
                yield step
            self.ending = payload


def _record(entries: Mapping[str, object]) -> bytes:
    payload: bytes = msgpack.packb(entries)
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


def _entries(payload: bytes, path: Path) -> dict[Any, object]:
    try:
        return as_map(msgpack.unpackb(payload), "record")
    except (ValueError, TypeError, WireError) as error:
        raise RecordingError(f"{path}: a record is not readable: {error}") from error


def _read_header(file: BinaryIO, path: Path) -> EpisodeHeader:
    if file.read(len(SIGNATURE)) != SIGNATURE:
        raise RecordingError(f"{path}: not a recording (it does not start with {SIGNATURE!r})")
    payload = _read_payload(file)
    if isinstance(payload, Ending):
        raise RecordingError(f"{path}: the header is {payload.value}; there is nothing to read")
    try:
        return _HEADER.read(_entries(payload, path), "", ReadContext(_LIMITS))
    except WireError as error:
        raise RecordingError(f"{path}: the header is unusable: {error}") from error


def _build_step(values: Json) -> RecordedStep:
    message = decode_request(values["request"], _LIMITS)
    return RecordedStep(
        index=values["index"],
        at_s=values["at_s"],
        observation=message.observation,
        options=message.options,
        chunk=decode_answer(values["answer"], _LIMITS),
    )


_HEADER = record_of(EpisodeHeader, is_open=True)
_STEP: Kind[RecordedStep] = record(
    _build_step,
    {
        "kind": constant("step"),
        "index": whole(low=0),
        "at_s": number(),
        "request": BINARY,
        "answer": BINARY,
    },
    is_open=True,
)


def _read_step(entries: dict[Any, object], path: Path) -> RecordedStep | None:
    """Return the step in a record, or None where the record ends the episode."""
    if entries.get("kind") == "end":
        return None
    try:
        return _STEP.read(entries, "", ReadContext(_LIMITS))
    except WireError as error:
        raise RecordingError(f"{path}: a step is unusable: {error}") from error
