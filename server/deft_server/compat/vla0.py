"""The messages of VLA-0's own clients: pictures as base64 of .npy files, answers as bare lists."""

import json
from collections.abc import Mapping
from io import BytesIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from deft_core.errors import (
    MalformedMessageError,
    MessageTooLargeError,
    Problem,
    UnusableValueError,
)
from deft_core.peers.arrays import (
    check_camera_count,
    read_frame,
    read_state,
    read_text,
    take,
)
from deft_core.types import ActionChunk, Image, Observation
from deft_core.wire.codec import problem_fields
from deft_core.wire.formats import decode_base64
from deft_core.wire.images import array_over
from deft_core.wire.limits import ReadContext
from deft_core.wire.messages import ActMessage
from deft_core.wire.refusals import brief

_PICTURES = "base64_rgb"
_MOST_HEADER = 1024  # bytes of a .npy file before its numbers


def vla0_request(fields: Mapping[str, object], context: ReadContext) -> ActMessage:
    """Read what VLA-0's server takes: the frame, then wrist cameras."""
    limits = context.limits
    texts = take(fields, _PICTURES)
    if not isinstance(texts, list) or not texts:
        raise UnusableValueError(_PICTURES, f"must be a list of pictures, got {brief(texts)}")
    check_camera_count(len(texts), limits)
    image, *wrists = (
        _read_npy(text, f"{_PICTURES}[{number}]", context) for number, text in enumerate(texts)
    )
    instruction = take(fields, "instr")
    if instruction is None:
        raise UnusableValueError(
            "instr", "is null; VLA-0's server would ask for 'None'. Send an instruction"
        )
    cameras = {f"wrist_{number}": one for number, one in enumerate(wrists, start=1)}
    state = read_state(take(fields, "state"), "state", limits)
    return ActMessage(Observation(image, read_text(instruction, "instr", limits), cameras, state))


def _read_npy(text: object, field: str, context: ReadContext) -> Image:
    """A picture of a .npy file, whose header is read before anything is allocated."""
    if not isinstance(text, str):
        raise UnusableValueError(field, f"must be base64 of a .npy file, got {brief(text)}")
    try:
        data = decode_base64(text)
    except ValueError as error:
        raise MalformedMessageError(field, f"not base64: {error}") from None
    if len(data) > 4 * context.limits.max_image_pixels + _MOST_HEADER:
        raise MessageTooLargeError(field, f"{len(data)} bytes")
    file = BytesIO(data)
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, dtype = read(file, max_header_size=_MOST_HEADER)
    except Exception:  # noqa: BLE001  numpy raises what its parser of headers does
        raise MalformedMessageError(field, "not a .npy file of numbers") from None
    if dtype != np.uint8 or is_fortran or len(shape) not in (2, 3) or min(shape) < 1:
        raise UnusableValueError(
            field, f"must be uint8 [height, width, 3] in C order, got {dtype} {list(shape)}"
        )
    pixels = array_over(data[file.tell() :], dtype, list(shape), field)
    return read_frame(pixels, field, context)


def encode_actions(chunk: ActionChunk) -> bytes:
    """All rows, as a list of lists."""
    return json.dumps(chunk.actions.tolist(), separators=(",", ":")).encode()


def encode_rows(actions: NDArray[np.float64], first: int) -> bytes:
    """A line for each row from the first on."""
    rows = enumerate(actions[first:].tolist(), start=first)
    return b"".join(_line({"index": index, "value": [row]}) for index, row in rows)


def encode_time(took_s: float) -> bytes:
    """The last line of a stream: how long all rows took."""
    return _line({"time_taken": took_s})


def encode_failure(problem: Problem) -> bytes:
    """The last line of a stream that breaks off."""
    return _line({"error": problem_fields(problem)})


def _line(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields).encode() + b"\n"
