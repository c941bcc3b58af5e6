"""Reads and writes the messages between a robot and a server; JSON or msgpack is an argument.

What is read is judged before any picture is decoded, see `read_request`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from msgspec import UNSET, Raw
from numpy.typing import NDArray

from deft_core.errors import (
    MalformedMessageError,
    MessageTooLargeError,
    Problem,
    UnusableValueError,
    WireError,
)
from deft_core.types import (
    ActionChunk,
    ActOptions,
    DecodeTrace,
    Image,
    Observation,
    ServerInfo,
    StageTimings,
)
from deft_core.wire.formats import (
    WireFormat,
    check_bytes,
    convert,
    decode,
    decode_base64,
    encode,
)
from deft_core.wire.images import (
    JPEG_QUALITY,
    ImageEncoding,
    array_over,
    check_image_size,
    claim_pixels,
    claimed_size,
    decode_image,
    encode_image,
)
from deft_core.wire.limits import DEFAULT_LIMITS, ReadContext, WireLimits
from deft_core.wire.messages import (
    VERSION,
    ActAnswer,
    ActAnswers,
    ActMessage,
    ActMessages,
    ActRequest,
    ActRequests,
    Array,
    Envelope,
    Picture,
    Reset,
)
from deft_core.wire.refusals import check_text

MAX_PROBLEM_BYTES = 64 * 1024  # it has a dozen short fields
MAX_COUNT = 65_536  # of each size that a server says of itself
_COUNTS = (
    "action_dim",
    "chunk_length",
    "image_height",
    "image_width",
    "num_pictures",
    "state_dim",
    "max_tokens",
)
_MAX_NODES = 16_384  # of all passes of a trace that is sent: four numbers each
_RAW = ImageEncoding.RAW.value
_STAGES = {one.name for one in fields(StageTimings)}


def encode_request(
    message: ActMessage,
    encoding: ImageEncoding = ImageEncoding.RAW,
    quality: int = JPEG_QUALITY,
    wire_format: WireFormat = WireFormat.MSGPACK,
) -> bytes:
    """Return a request as bytes; `quality` matters to JPEG only."""
    observation, options = message.observation, message.options
    cameras = {
        name: _picture(image, encoding, quality) for name, image in observation.cameras.items()
    }
    state = observation.state
    request = ActRequest(
        v=VERSION,
        id=message.id,
        image=_picture(observation.image, encoding, quality),
        instruction=observation.instruction,
        session_id=options.session_id,
        deadline_ms=options.deadline_ms,
        statistics_key=options.statistics_key,
        decoding=options.decoding,
        radius=options.radius,
        trace=options.want_trace or None,
        reasoning=options.want_reasoning or None,
        max_tokens=options.max_tokens,
        log_probs=options.want_log_probs or None,
        executed_steps=options.executed_steps,
        notes=options.want_notes or None,
        state=None if state is None else _array(state, "float32"),
        cameras=cameras or None,
    )
    return encode(request, wire_format)


def encode_requests(
    messages: Sequence[ActMessage],
    message_id: str | None = None,
    encoding: ImageEncoding = ImageEncoding.RAW,
    quality: int = JPEG_QUALITY,
    wire_format: WireFormat = WireFormat.MSGPACK,
) -> bytes:
    """Return a request with several observations as bytes."""
    each = [Raw(encode_request(one, encoding, quality, wire_format)) for one in messages]
    return encode(ActRequests(v=VERSION, id=message_id, observations=each), wire_format)


def parse_request(
    data: bytes,
    wire_format: WireFormat = WireFormat.MSGPACK,
    limits: WireLimits = DEFAULT_LIMITS,
) -> ActRequest | ActRequests:
    """Return a request as it travels, its pictures not decoded, or raise `WireError`."""
    try:
        return _parse_one(data, wire_format, limits)
    except MalformedMessageError as error:
        if error.field != "observations":  # a request for one frame has no such field
            raise
        return decode(data, ActRequests, wire_format, limits)


def _parse_one(data: bytes | Raw, wire_format: WireFormat, limits: WireLimits) -> ActRequest:
    if wire_format is WireFormat.MSGPACK:
        return decode(data, ActRequest, wire_format, limits)
    # Pictures first: base64 takes msgspec ten times as long as the library for it.
    try:
        entries: object = decode(data, object, wire_format, limits)
    except (MalformedMessageError, UnusableValueError):  # the types know more of what is wrong
        return decode(data, ActRequest, wire_format, limits)
    if isinstance(entries, dict):
        cameras = entries.get("cameras")
        views = cameras.values() if isinstance(cameras, dict) else ()
        for picture in (entries.get("image"), *views):
            if isinstance(picture, dict) and isinstance(picture.get("data"), str):
                with suppress(ValueError):  # `convert` says where it is not base64
                    picture["data"] = decode_base64(picture["data"])
    return convert(entries, ActRequest)


def needs_decoding(request: ActRequest | ActRequests) -> bool:
    """Would reading this request decode a PNG or JPEG, and so take a while? Several may."""
    if isinstance(request, ActRequests):
        return True
    pictures = [request.image, *(request.cameras or {}).values()]
    return any((one.encoding or _RAW) != _RAW for one in pictures)


def read_request(request: ActRequest, context: ReadContext) -> ActMessage:
    """Return what a request carries, or raise `WireError`. Raw frames are read-only.

    All is judged that may be refused before the first picture is decoded.
    """
    limits = context.limits
    for name in ("id", "session_id", "statistics_key", "decoding"):
        check_text(getattr(request, name) or "", name, limits.max_name_chars)
    check_text(request.instruction, "instruction", limits.max_instruction_chars)
    state = None if request.state is None else _read_state(request.state, limits)
    cameras = request.cameras or {}
    _check_cameras(cameras, limits)
    frames = [_frame_reader(request.image, "image", context)]
    frames += [_frame_reader(one, f"cameras.{name}", context) for name, one in cameras.items()]
    image, *views = (read() for read in frames)
    return ActMessage(
        Observation(image, request.instruction, dict(zip(cameras, views, strict=True)), state),
        ActOptions(
            session_id=request.session_id,
            deadline_ms=request.deadline_ms,
            statistics_key=request.statistics_key,
            decoding=request.decoding,
            radius=request.radius,
            want_trace=bool(request.trace),
            want_reasoning=bool(request.reasoning),
            max_tokens=request.max_tokens,
            want_log_probs=bool(request.log_probs),
            executed_steps=request.executed_steps,
            want_notes=bool(request.notes),
        ),
        request.id,
    )


def read_requests(
    requests: ActRequests, wire_format: WireFormat, context: ReadContext
) -> ActMessages:
    """Return what each observation carries, or what is wrong with it: it fails alone."""
    limits = context.limits
    check_text(requests.id or "", "id", limits.max_name_chars)
    if len(requests.observations) > limits.max_observations:
        raise MessageTooLargeError(
            "observations",
            f"{len(requests.observations)} of them; at most {limits.max_observations} are allowed "
            "in one message",
        )
    each: list[ActMessage | WireError] = []
    sessions: set[str] = set()
    for observation in requests.observations:
        try:
            request = _parse_one(observation, wire_format, limits)
            message = read_request(request, context)
            if request.session_id in sessions:
                raise UnusableValueError(
                    "session_id", "another observation of this message is of the same session"
                )
            if request.session_id is not None:
                sessions.add(request.session_id)
            each.append(message)
        except WireError as error:
            each.append(error)
    return ActMessages(each, requests.id)


def decode_request(
    data: bytes,
    wire_format: WireFormat = WireFormat.MSGPACK,
    limits: WireLimits = DEFAULT_LIMITS,
) -> ActMessage:
    """Return what a request with one observation carries, or raise `WireError`."""
    return read_request(_parse_one(data, wire_format, limits), ReadContext(limits))


def encode_answer(
    chunk: ActionChunk,
    message_id: str | None = None,
    wire_format: WireFormat = WireFormat.MSGPACK,
) -> bytes:
    """Return an answer as bytes."""
    actions = chunk.actions
    answer = ActAnswer(
        v=VERSION,
        id=message_id,
        actions=actions.tolist() if wire_format is WireFormat.JSON else _array(actions, "float64"),
        timings={stage: spent for stage, spent in vars(chunk.timings).items() if spent},
        trace=None if chunk.trace is None else sent_trace(chunk.trace),
        intervention=chunk.intervention,
        reasoning=chunk.reasoning,
        log_probs=chunk.log_probs,
        notes=chunk.notes,
    )
    return encode(answer, wire_format)


def encode_answers(
    answers: Sequence[ActionChunk | Problem],
    ids: Sequence[str | None],
    message_id: str | None,
    wire_format: WireFormat = WireFormat.MSGPACK,
) -> bytes:
    """Return the answers to several observations, whose own ids those are, as bytes."""
    each = [
        encode(problem_fields(one), wire_format)
        if isinstance(one, Problem)
        else encode_answer(one, own_id, wire_format)
        for one, own_id in zip(answers, ids, strict=True)
    ]
    several = ActAnswers(v=VERSION, id=message_id, answers=[Raw(one) for one in each])
    return encode(several, wire_format)


def decode_answer(
    data: bytes | Raw,
    wire_format: WireFormat = WireFormat.MSGPACK,
    limits: WireLimits = DEFAULT_LIMITS,
) -> ActionChunk:
    """Return an answer, or raise `WireError`. Its actions may be read-only."""
    check_bytes(data, limits.max_answer_bytes)
    answer = decode(data, ActAnswer, wire_format, limits)
    timings = {stage: ms for stage, ms in (answer.timings or {}).items() if stage in _STAGES}
    trace = answer.trace
    return ActionChunk(
        _read_actions(answer.actions, limits),
        StageTimings(**timings),
        None if trace is None else replace(trace, passes=tuple(trace.passes)),
        answer.intervention,
        answer.reasoning,
        answer.log_probs,
        answer.notes,
    )


def decode_answers(
    data: bytes,
    wire_format: WireFormat = WireFormat.MSGPACK,
    limits: WireLimits = DEFAULT_LIMITS,
) -> tuple[ActionChunk | Problem, ...]:
    """Return the answers to several observations, or raise `WireError`."""
    answers = decode(data, ActAnswers, wire_format, limits).answers
    return tuple(
        decode(one, Problem, wire_format, limits)
        if decode(one, Envelope, wire_format, limits).actions is UNSET
        else decode_answer(one, wire_format, limits)
        for one in answers
    )


def message_id(data: bytes) -> str | None:
    """Return the `id` of a message in msgpack, reading little else; None where there is none."""
    try:
        return decode(data, Envelope, WireFormat.MSGPACK).id
    except WireError:  # the rest of the message has the same fault, and is judged for it
        return None


def sent_trace(trace: DecodeTrace) -> DecodeTrace:
    """Return a trace as it is sent: of a long text's wide passes the accepted nodes alone."""
    passes = list(trace.passes)
    if sum(len(one.tokens) for one in passes) > _MAX_NODES:
        passes = [one.accepted() for one in passes]
    return replace(trace, passes=passes)


def encode_problem(problem: Problem) -> bytes:
    """Return why a request could not be answered, as application/problem+json."""
    return encode(problem_fields(problem), WireFormat.JSON)


def problem_fields(problem: Problem) -> dict[str, object]:
    """Return why something could not be answered as a map."""
    return {name: value for name, value in vars(problem).items() if value is not None}


def decode_problem(status: int, data: bytes, retry_after_s: float | None = None) -> Problem:
    """Return why a request could not be answered, whatever the body is."""
    title = f"HTTP {status}"
    try:
        check_bytes(data, MAX_PROBLEM_BYTES)
        fields = decode(data, dict, WireFormat.JSON)
        problem = convert({"title": title, **fields, "status": status}, Problem)
    except WireError:
        problem = Problem(status, title, _words_of(status, data))
    return problem if retry_after_s is None else replace(problem, retry_after_s=retry_after_s)


def _words_of(status: int, data: bytes) -> str:
    """Return what a body says that no server of ours wrote."""
    text = data[:200].decode("utf-8", "replace").strip()
    if not text.startswith("<"):
        return text
    if status in (502, 504):
        return "a proxy answered in place of the server, which is down or which it cannot reach"
    return "a page of HTML came back: something before the server answered, a proxy perhaps"


def encode_reset(session_id: str) -> bytes:
    """Return the JSON that says that an episode of a session starts."""
    return encode(Reset(session_id), WireFormat.JSON)


def decode_reset(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> str:
    """Return the session id that a reset names, or raise `WireError`."""
    session_id = decode(data, Reset, WireFormat.JSON, limits).session_id
    return check_text(session_id, "session_id", limits.max_name_chars)


def encode_info(info: ServerInfo) -> bytes:
    """Return what a server says about itself as JSON."""
    return encode(info, WireFormat.JSON)


def decode_info(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> ServerInfo:
    """Return what a server says about itself; fields of later versions are passed over."""
    info = decode(data, ServerInfo, WireFormat.JSON, limits)
    for name in _COUNTS:
        count = getattr(info, name)
        if count is not None and not 0 < count <= MAX_COUNT:
            raise UnusableValueError(name, f"must be an integer from 1 to {MAX_COUNT}, got {count}")
    return info


def _picture(image: Image, encoding: ImageEncoding, quality: int) -> Picture:
    data = encode_image(image, encoding, quality)
    if encoding is not ImageEncoding.RAW:
        return Picture(encoding=encoding.value, data=data)
    return Picture(encoding="raw", dtype="uint8", shape=list(image.shape), data=data)


def _array(values: NDArray[np.generic], dtype: Literal["float32", "float64"]) -> Array:
    layout = np.dtype(dtype).newbyteorder("<")
    return Array(dtype=dtype, shape=list(values.shape), data=values.astype(layout).tobytes())


def _check_cameras(cameras: Mapping[str, Picture], limits: WireLimits) -> None:
    if len(cameras) > limits.max_cameras:
        raise MessageTooLargeError(
            "cameras", f"{len(cameras)} cameras; at most {limits.max_cameras} are allowed"
        )
    for name in cameras:
        if not 0 < len(name) <= limits.max_name_chars or not name.isprintable():
            raise UnusableValueError(
                "cameras", f"a camera's name has 1 to {limits.max_name_chars} printable characters"
            )


def _frame_reader(picture: Picture, field: str, context: ReadContext) -> Callable[[], Image]:
    """Return what reads a camera frame, which may be used."""
    if (picture.encoding or _RAW) == _RAW:
        pixels = _raw_pixels(picture, field, context.limits)
        return lambda: pixels
    for name in ("dtype", "shape"):
        if getattr(picture, name) is not None:
            raise MalformedMessageError(f"{field}.{name}", "only raw pixels have it; remove it")
    claim_pixels(*claimed_size(picture.data, field), field, context)
    return partial(decode_image, picture.data, field, context.limits)


def _raw_pixels(picture: Picture, field: str, limits: WireLimits) -> Image:
    if picture.dtype is None or picture.shape is None:
        name = "dtype" if picture.dtype is None else "shape"
        raise MalformedMessageError(f"{field}.{name}", "missing; raw pixels have dtype and shape")
    shape = picture.shape
    if len(shape) != 3 or shape[2] != 3:
        raise UnusableValueError(f"{field}.shape", f"must be [height, width, 3], got {shape}")
    check_image_size(shape[0], shape[1], f"{field}.shape", limits)
    return array_over(picture.data, np.dtype(np.uint8), shape, f"{field}.data")


def _read_state(state: Array | list[float], limits: WireLimits) -> NDArray[np.float32]:
    most = limits.max_state_dim
    if isinstance(state, Array):
        values = _read_array(state, "float32", "state", most)
    elif len(state) > most:
        raise MessageTooLargeError("state", f"{len(state)} numbers; at most {most} are allowed")
    else:
        with np.errstate(over="ignore"):
            values = np.array(state, np.float32)
    if values.ndim != 1:
        raise UnusableValueError("state", f"must be [state_dim], got {list(values.shape)}")
    if not np.isfinite(values).all():
        raise UnusableValueError("state", "must be finite in float32, got NaN or infinity")
    return values


def _read_actions(actions: Array | list[list[float]], limits: WireLimits) -> NDArray[np.float64]:
    most = limits.max_action_values
    if isinstance(actions, Array):
        values = _read_array(actions, "float64", "actions", most)
    else:
        if len({len(row) for row in actions}) != 1:
            raise UnusableValueError("actions", "must be a list of equally long lists of numbers")
        values = np.array(actions, np.float64)
    if values.ndim != 2:
        shape = list(values.shape)
        raise UnusableValueError("actions", f"must be [step, action_dim], got {shape}")
    if values.size > most:
        raise MessageTooLargeError("actions", f"more than the {most} numbers that are allowed")
    return values


def _read_array(array: Array, dtype: str, field: str, most: int) -> NDArray[Any]:
    if array.dtype != dtype:
        raise UnusableValueError(f"{field}.dtype", f"must be {dtype}, got {array.dtype}")
    if math.prod(array.shape) > most:
        raise MessageTooLargeError(
            f"{field}.shape", f"{array.shape} is beyond the {most} values that are allowed"
        )
    layout = np.dtype(dtype).newbyteorder("<")
    return array_over(array.data, layout, array.shape, f"{field}.data")
