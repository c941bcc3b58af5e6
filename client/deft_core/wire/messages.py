"""Which fields a message has: requests and answers as maps, the same for every encoding.

`msgpack_codec`, `json_codec` and the server's forms turn bytes into maps and back; the kinds here
read the maps, and the server's OpenAPI document is made of them. Fields that are None are left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from deft_core.errors import (
    MalformedMessageError,
    MessageTooLargeError,
    Problem,
    UnsupportedMessageError,
    UnusableValueError,
    WireError,
)
from deft_core.types import (
    ActionChunk,
    ActOptions,
    DecodeTrace,
    Image,
    Intervention,
    LogProbs,
    Observation,
    ServerInfo,
    StageTimings,
)
from deft_core.wire.fields import (
    BINARY,
    FLAG,
    NAME,
    SENTENCE,
    Json,
    Kind,
    ReadContext,
    WireLimits,
    as_map,
    brief,
    list_of,
    map_of,
    number,
    record,
    record_of,
    text,
    whole,
    word,
)
from deft_core.wire.images import (
    ImageEncoding,
    array,
    array_parts,
    check_image_size,
    claim_pixels,
    claimed_size,
    decode_image,
    encode_image,
)

VERSION = 1
MAX_RADIUS = 65_535  # bins; policies set their own, lower bounds
MAX_EXECUTED = 65_535  # steps of one answer
MAX_TOKENS = 65_535  # of one answer; policies set their own, lower bounds
MAX_DEADLINE_MS = 24 * 3600 * 1000
_MOST_NODES = 16_384  # of all passes of a trace: four numbers each, beside the rest of a message
_LAYOUTS: Mapping[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float64": np.dtype("<f8")}
_RAW = ImageEncoding.RAW.value
_ENCODED = (ImageEncoding.PNG.value, ImageEncoding.JPEG.value)


@dataclass(frozen=True, eq=False)
class ActMessage:
    """What one request carries: the observation, and how it is to be answered.

    The answer repeats `id`: where answers could be mixed up, the caller tells by it which is which.
    """

    observation: Observation
    options: ActOptions = field(default_factory=ActOptions)
    id: str | None = None


@dataclass(frozen=True, eq=False)
class ActMessages:
    """What one request with several observations carries, each of a session of its own.

    One that cannot be used stands in its place as the error it is: the others are answered.
    """

    each: Sequence[ActMessage | WireError]
    id: str | None = None


def request_fields(
    message: ActMessage, encoding: ImageEncoding = ImageEncoding.RAW, quality: int = 95
) -> Json:
    """Return a request as a map."""
    observation, options = message.observation, message.options
    cameras = {
        name: _image_fields(image, encoding, quality) for name, image in observation.cameras.items()
    }
    entries = {
        "v": VERSION,
        "id": message.id,
        "image": _image_fields(observation.image, encoding, quality),
        "instruction": observation.instruction,
        "session_id": options.session_id,
        "deadline_ms": options.deadline_ms,
        "statistics_key": options.statistics_key,
        "decoding": options.decoding,
        "radius": options.radius,
        "trace": options.want_trace or None,
        "reasoning": options.want_reasoning or None,
        "max_tokens": options.max_tokens,
        "log_probs": options.want_log_probs or None,
        "executed_steps": options.executed_steps,
        "notes": options.want_notes or None,
        "state": None if observation.state is None else _array_fields(observation.state, "float32"),
        "cameras": cameras or None,
    }
    return {name: value for name, value in entries.items() if value is not None}


def answer_fields(chunk: ActionChunk, message_id: str | None = None) -> Json:
    """Return an answer as a map; timings that are zero are left out."""
    entries: Json = {
        "v": VERSION,
        **({} if message_id is None else {"id": message_id}),
        "actions": _array_fields(chunk.actions, "float64"),
        "timings": dict(filter(itemgetter(1), vars(chunk.timings).items())),
    }
    if chunk.trace is not None:
        entries["trace"] = trace_fields(chunk.trace)
    if chunk.intervention is not None:
        entries["intervention"] = chunk.intervention.value
    if chunk.reasoning is not None:
        entries["reasoning"] = chunk.reasoning
    if chunk.log_probs is not None:
        entries["log_probs"] = vars(chunk.log_probs)
    if chunk.notes:
        entries["notes"] = chunk.notes
    return entries


def trace_fields(trace: DecodeTrace) -> Json:
    """Return a trace as a map, without `parts` where there are none: older clients know no parts.

    Of a long text's wide passes only the accepted nodes are listed: a message has its limits.
    """
    passes = trace.passes
    if sum(len(one.tokens) for one in passes) > _MOST_NODES:
        passes = [one.accepted() for one in passes]
    entries = {**vars(trace), "passes": [vars(one) for one in passes]}
    if not trace.parts:
        del entries["parts"]
    return entries


def answers_fields(
    answers: Sequence[ActionChunk | Problem],
    ids: Sequence[str | None],
    message_id: str | None = None,
    fields_of: Callable[[ActionChunk, str | None], Json] = answer_fields,
) -> Json:
    """Return the answers to several observations, whose own ids those are, as a map."""
    each = [
        problem_fields(one) if isinstance(one, Problem) else fields_of(one, own_id)
        for one, own_id in zip(answers, ids, strict=True)
    ]
    id_field = {} if message_id is None else {"id": message_id}
    return {"v": VERSION, **id_field, "answers": each}


def problem_fields(problem: Problem) -> Json:
    """Return why something could not be answered as a map."""
    return {name: value for name, value in vars(problem).items() if value is not None}


def read_request(entries: object, context: ReadContext) -> ActMessage | ActMessages:
    """Return the one observation, or the several, that a request carries; or raise `WireError`."""
    if isinstance(entries, dict) and "observations" in entries:
        return REQUESTS.read(entries, "", context)
    return REQUEST.read(entries, "", context)


def has_pictures(entries: object) -> bool:
    """Would reading this request decode a PNG or JPEG, and so take a while?"""
    if not isinstance(entries, dict):
        return False
    several = entries.get("observations")
    if isinstance(several, list):
        return any(map(has_pictures, several))
    cameras = entries.get("cameras")
    images = [entries.get("image"), *(cameras.values() if isinstance(cameras, dict) else ())]
    return any(isinstance(one, dict) and one.get("encoding", _RAW) != _RAW for one in images)


def _image_fields(image: Image, encoding: ImageEncoding, quality: int) -> Json:
    data = encode_image(image, encoding, quality)
    if encoding is not ImageEncoding.RAW:
        return {"encoding": encoding.value, "data": data}
    return {"encoding": _RAW, "dtype": "uint8", "shape": list(image.shape), "data": data}


def _array_fields(values: NDArray[np.generic], dtype: str) -> Json:
    data = values.astype(_LAYOUTS[dtype]).tobytes()
    return {"dtype": dtype, "shape": list(values.shape), "data": data}


def _read_version(value: object, where: str, context: ReadContext) -> int:
    if isinstance(value, bool) or value != VERSION:
        raise UnsupportedMessageError(where, f"must be {VERSION}, got {brief(value)}")
    return VERSION


_PIXELS = array_parts("uint8", lambda limits: 3 * limits.max_image_pixels)
_PICTURE: Kind[Json] = record(dict, {"data": BINARY})


def _read_image(value: object, where: str, context: ReadContext) -> Image | partial[Image]:
    """Return a camera frame, raw or as PNG or JPEG."""
    parts = dict(as_map(value, where))
    spelling = parts.pop("encoding", _RAW) or _RAW
    if spelling in _ENCODED:
        return _claim(_PICTURE.read(parts, where, context)["data"], where, context)
    if spelling != _RAW:
        known = ", ".join(one.value for one in ImageEncoding)
        raise UnsupportedMessageError(
            f"{where}.encoding", f"must be one of {known}, got {brief(spelling)}"
        )
    pixels = _PIXELS.read(parts, where, context)
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        shape = list(pixels.shape)
        raise UnusableValueError(f"{where}.shape", f"must be [height, width, 3], got {shape}")
    check_image_size(pixels.shape[0], pixels.shape[1], f"{where}.shape", context.limits)
    return pixels


def _claim(data: bytes, where: str, context: ReadContext) -> partial[Image]:
    """Return how to decode a picture once all is read that might be refused."""
    claim_pixels(*claimed_size(data, where), where, context)
    return partial(decode_image, data, where, context.limits)


def _decoded(picture: Image | partial[Image]) -> Image:
    return picture() if isinstance(picture, partial) else picture


def _image_schema(limits: WireLimits) -> Json:
    encoded, raw = _PICTURE.schema(limits), _PIXELS.schema(limits)
    encoded["properties"]["encoding"] = {"enum": ["png", "jpeg"]}
    encoded["required"].append("encoding")
    raw["properties"]["encoding"] = {"const": _RAW}
    return {"anyOf": [encoded, raw]}


def _read_cameras(
    value: object, where: str, context: ReadContext
) -> dict[str, Image | partial[Image]]:
    """Return the cameras by name; too many are refused before any of their frames is decoded."""
    entries, limits = as_map(value, where), context.limits
    if len(entries) > limits.max_cameras:
        raise MessageTooLargeError(
            where, f"{len(entries)} of them; at most {limits.max_cameras} are taken"
        )
    for name in entries:
        if not (isinstance(name, str) and 0 < len(name) <= limits.max_name_chars) or (
            not name.isprintable()
        ):
            raise UnusableValueError(
                where, f"a camera's name has 1 to {limits.max_name_chars} printable characters"
            )
    return _IMAGES.read(entries, where, context)


def _build_request(values: Json) -> ActMessage:
    read = values.get
    cameras = {name: _decoded(picture) for name, picture in read("cameras", {}).items()}
    return ActMessage(
        Observation(_decoded(values["image"]), values["instruction"], cameras, read("state")),
        ActOptions(
            read("session_id"),
            read("deadline_ms"),
            read("statistics_key"),
            read("decoding"),
            read("radius"),
            read("trace", False),
            read("reasoning", False),
            read("max_tokens"),
            read("log_probs", False),
            read("executed_steps"),
            read("notes", False),
        ),
        read("id"),
    )


def _read_observations(
    value: object, where: str, context: ReadContext
) -> tuple[ActMessage | WireError, ...]:
    """Return each observation, or what is wrong with it: it fails alone."""
    if not isinstance(value, list) or not value:
        raise MalformedMessageError(where, f"must be a list of observations, got {brief(value)}")
    most = context.limits.max_observations
    if len(value) > most:
        raise MessageTooLargeError(
            where, f"{len(value)} of them; at most {most} are taken in one message"
        )
    each: list[ActMessage | WireError] = []
    sessions: set[str | None] = set()
    for entries in value:
        try:
            message = REQUEST.read(entries, "", context)
            session_id = message.options.session_id
            if session_id is not None and session_id in sessions:
                raise UnusableValueError(
                    "session_id", "another observation of this message is of the same session"
                )
            sessions.add(session_id)
            each.append(message)
        except WireError as error:
            each.append(error)
    return tuple(each)


def _observations_schema(limits: WireLimits) -> Json:
    schema = REQUEST.schema(limits)
    return {"type": "array", "items": schema, "minItems": 1, "maxItems": limits.max_observations}


def _read_answers(
    value: object, where: str, context: ReadContext
) -> tuple[ActionChunk | Problem, ...]:
    if not isinstance(value, list):
        raise MalformedMessageError(where, f"must be a list, got {brief(value)}")
    return tuple(
        (ANSWER if "actions" in as_map(one, f"{where}[{at}]") else PROBLEM).read(one, "", context)
        for at, one in enumerate(value)
    )


def _answers_schema(limits: WireLimits) -> Json:
    either = {"anyOf": [ANSWER.schema(limits), PROBLEM.schema(limits)]}
    return {"type": "array", "items": either}


def _build_answer(values: Json) -> ActionChunk:
    return ActionChunk(**{name: value for name, value in values.items() if name not in ("v", "id")})


def _cameras_schema(limits: WireLimits) -> Json:
    return {**_IMAGES.schema(limits), "maxProperties": limits.max_cameras}


SAID = text(lambda _: 65_536)
_IMAGE = Kind(_read_image, _image_schema)
_IMAGES = map_of(_IMAGE)
_VERSION = Kind(_read_version, lambda limits: {"type": "integer", "const": VERSION})
OPTIONS: Mapping[str, Kind[Any]] = {
    "session_id": NAME,
    "deadline_ms": number(MAX_DEADLINE_MS),
    "statistics_key": NAME,
    "decoding": NAME,
    "radius": whole(0, MAX_RADIUS),
    "trace": FLAG,
    "reasoning": FLAG,
    "max_tokens": whole(1, MAX_TOKENS),
    "log_probs": FLAG,
    "executed_steps": whole(0, MAX_EXECUTED),
    "notes": FLAG,
}
REQUEST = record(
    _build_request,
    {
        "v": _VERSION,
        "id": NAME,
        **OPTIONS,
        "instruction": SENTENCE,
        "state": array("float32", ("state_dim",), lambda limits: limits.max_state_dim, True),
        "image": _IMAGE,
        "cameras": Kind(_read_cameras, _cameras_schema),
    },
    optional=("v", "id", *OPTIONS, "state", "cameras"),
)
ANSWER = record(
    _build_answer,
    {
        "v": _VERSION,
        "id": NAME,
        "actions": array(
            "float64", ("step", "action_dim"), lambda limits: limits.max_action_values
        ),
        "timings": record_of(StageTimings),
        "trace": record_of(DecodeTrace, {"guard": SENTENCE, "rule": SENTENCE}),
        "intervention": word(Intervention),
        "reasoning": SAID,
        "log_probs": record_of(LogProbs),
        "notes": list_of(SAID),
    },
    optional=("v", "id", "timings", "trace", "intervention", "reasoning", "log_probs", "notes"),
)
REQUESTS = record(
    lambda values: ActMessages(values["observations"], values.get("id")),
    {"v": _VERSION, "id": NAME, "observations": Kind(_read_observations, _observations_schema)},
    optional=("v", "id"),
)
ANSWERS: Kind[tuple[ActionChunk | Problem, ...]] = record(
    lambda values: cast(tuple[ActionChunk | Problem, ...], values["answers"]),
    {"v": _VERSION, "id": NAME, "answers": Kind(_read_answers, _answers_schema)},
    optional=("v", "id"),
)
RESET = record(lambda values: cast(str, values["session_id"]), {"session_id": NAME})
_COUNT = whole(1, 65_536)
# Both are open to fields of later versions.
INFO = record_of(
    ServerInfo,
    {
        **dict.fromkeys(("action_dim", "chunk_length", "image_height", "image_width"), _COUNT),
        **dict.fromkeys(("num_pictures", "state_dim", "max_tokens"), _COUNT),
        "instructions": list_of(SENTENCE),
    },
    is_open=True,
)
PROBLEM = record_of(
    Problem,
    dict.fromkeys(("title", "detail", "type", "field", "request_id", "reasoning"), SAID),
    is_open=True,
)
