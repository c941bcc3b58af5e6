"""Which fields a message has: requests and answers as maps, the same for every encoding.

`wire` turns the maps into msgpack, `wire_json` into JSON. Fields that are None are left out.
"""

from dataclasses import dataclass, field, fields
from typing import cast

import numpy as np
from numpy.typing import NDArray

from deft_client.errors import (
    MessageTooLargeError,
    UnsupportedMessageError,
    UnusableValueError,
)
from deft_client.types import (
    ActionChunk,
    ActOptions,
    DecodeTrace,
    Image,
    Intervention,
    Observation,
    PassTrace,
    StageTimings,
)
from deft_client.wire.fields import FieldReader, WireLimits, describe
from deft_client.wire.images import (
    ImageEncoding,
    check_image_size,
    decode_image,
    encode_image,
)

VERSION = 1
MAX_RADIUS = 65_535  # bins; policies set their own, lower bounds
MAX_DEADLINE_MS = 24 * 3600 * 1000

Fields = dict[str, object]

_OPTIONS = frozenset(("session_id", "deadline_ms", "statistics_key", "decoding", "radius", "trace"))
_NO_OPTIONS = ActOptions()
_RAW = ImageEncoding.RAW.value


@dataclass(frozen=True, eq=False)
class ActMessage:
    """What one request carries: the observation, and how it is to be answered."""

    observation: Observation
    options: ActOptions = field(default_factory=ActOptions)


def request_fields(
    message: ActMessage, encoding: ImageEncoding = ImageEncoding.RAW, quality: int = 95
) -> Fields:
    """Return a request as a map."""
    observation, options = message.observation, message.options
    entries: Fields = {
        "v": VERSION,
        "image": _image_fields(observation.image, encoding, quality),
        "instruction": observation.instruction,
        "session_id": options.session_id,
        "deadline_ms": options.deadline_ms,
        "statistics_key": options.statistics_key,
        "decoding": options.decoding,
        "radius": options.radius,
        "trace": options.want_trace or None,
        "state": None if observation.state is None else _array_fields(observation.state, "float32"),
        "cameras": {
            name: _image_fields(image, encoding, quality)
            for name, image in observation.cameras.items()
        }
        or None,
    }
    return {name: value for name, value in entries.items() if value is not None}


def read_request(reader: FieldReader) -> ActMessage:
    """Return the request in a map, or raise `WireError`."""
    read_version(reader)
    options = read_options(reader)
    instruction = reader.text("instruction", reader.limits.max_instruction_chars)
    state = read_state(reader) if reader.has("state") else None
    image = read_image(reader, "image")
    cameras = _read_cameras(reader) if reader.has("cameras") else {}
    reader.finish()
    return ActMessage(Observation(image, instruction, cameras, state), options)


def has_pictures(reader: FieldReader) -> bool:
    """Would reading this request decode a PNG or JPEG, and so take a while?"""
    cameras = reader.peek("cameras")
    if _is_picture(reader.peek("image")):
        return True
    return isinstance(cameras, dict) and any(map(_is_picture, cameras.values()))


def _is_picture(view: object) -> bool:
    return isinstance(view, dict) and view.get("encoding", _RAW) != _RAW


def read_version(reader: FieldReader) -> None:
    """Refuse any version of the protocol but ours; none at all means ours."""
    if not reader.has("v"):
        return
    version = reader.take("v")
    if isinstance(version, bool) or version != VERSION:
        raise UnsupportedMessageError("v", f"must be {VERSION}, got {describe(version)}")


def read_options(reader: FieldReader) -> ActOptions:
    """Take the fields that say how a request is to be answered."""
    if not reader.has_any(_OPTIONS):
        return _NO_OPTIONS
    deadline_ms = reader.number("deadline_ms") if reader.has("deadline_ms") else None
    if deadline_ms is not None and not 0 < deadline_ms <= MAX_DEADLINE_MS:
        raise UnusableValueError(
            reader.where("deadline_ms"),
            f"must be above 0 and at most {MAX_DEADLINE_MS}, got {deadline_ms}",
        )
    return ActOptions(
        session_id=reader.optional_name("session_id"),
        deadline_ms=deadline_ms,
        statistics_key=reader.optional_name("statistics_key"),
        decoding=reader.optional_name("decoding"),
        radius=reader.integer("radius", 0, MAX_RADIUS) if reader.has("radius") else None,
        want_trace=reader.flag("trace") if reader.has("trace") else False,
    )


def read_state(reader: FieldReader) -> NDArray[np.float32]:
    """Take the robot's state."""
    state = reader.array("state", "float32", reader.limits.max_state_dim)
    return check_state(state, reader.where("state"))


def check_state(state: NDArray[np.generic], where: str) -> NDArray[np.float32]:
    """Refuse a state that is not a vector of finite numbers."""
    if state.ndim != 1:
        raise UnusableValueError(where, f"must be [state_dim], got {list(state.shape)}")
    if not np.isfinite(state).all():
        raise UnusableValueError(where, "must be finite, got NaN or infinity")
    return cast(NDArray[np.float32], state)


def read_image(reader: FieldReader, name: str) -> Image:
    """Take one camera frame, raw or as PNG or JPEG."""
    child = reader.child(name)
    spelling = child.take("encoding") if child.has("encoding") else _RAW
    if spelling == _RAW:
        image = _read_raw_image(child, reader.where(name))
    elif spelling in (ImageEncoding.PNG.value, ImageEncoding.JPEG.value):
        image = decode_image(child.binary("data"), reader.where(name), reader.limits)
    else:
        known = ", ".join(one.value for one in ImageEncoding)
        raise UnsupportedMessageError(
            child.where("encoding"), f"must be one of {known}, got {describe(spelling)}"
        )
    child.finish()
    return image


def answer_fields(chunk: ActionChunk) -> Fields:
    """Return an answer as a map."""
    entries: Fields = {
        "v": VERSION,
        "actions": _array_fields(chunk.actions, "float64"),
        "timings": timings_fields(chunk.timings),
    }
    if chunk.trace is not None:
        entries["trace"] = trace_fields(chunk.trace)
    if chunk.intervention is not None:
        entries["intervention"] = chunk.intervention.value
    return entries


def read_answer(reader: FieldReader) -> ActionChunk:
    """Return the answer in a map, or raise `WireError`."""
    read_version(reader)
    actions = reader.array("actions", "float64", reader.limits.max_action_values)
    if actions.ndim != 2:
        raise UnusableValueError(
            reader.where("actions"), f"must be [step, action_dim], got {list(actions.shape)}"
        )
    timings = read_timings(reader.child("timings")) if reader.has("timings") else StageTimings()
    trace = read_trace(reader.child("trace")) if reader.has("trace") else None
    intervention = _read_intervention(reader) if reader.has("intervention") else None
    reader.finish()
    return ActionChunk(cast(NDArray[np.float64], actions), timings, trace, intervention)


def _read_intervention(reader: FieldReader) -> Intervention:
    return Intervention(reader.choice("intervention", [one.value for one in Intervention]))


def timings_fields(timings: StageTimings) -> Fields:
    """Return stage timings as a map of those that are not zero."""
    return {name: value for name, value in vars(timings).items() if value}


def read_timings(reader: FieldReader) -> StageTimings:
    """Return stage timings; a stage that is not mentioned took no time."""
    values = {
        one.name: reader.number(one.name) for one in fields(StageTimings) if reader.has(one.name)
    }
    reader.finish()
    return StageTimings(**values)


def trace_fields(trace: DecodeTrace) -> Fields:
    """Return a decode trace as a map."""
    entries: Fields = _listed(vars(trace))
    entries["passes"] = [_listed(vars(one)) for one in trace.passes]
    return entries


def read_trace(reader: FieldReader) -> DecodeTrace:
    """Return the decode trace in a map."""
    most = reader.limits.max_trace_values
    trace = DecodeTrace(
        method=reader.name("method"),
        tokens=reader.integers("tokens", most),
        predicted=reader.integers("predicted", most),
        margins=reader.numbers("margins", most),
        passes=tuple(_read_pass(one) for one in reader.children("passes", most)),
        guard=reader.text("guard", reader.limits.max_instruction_chars),
        rule=reader.text("rule", reader.limits.max_instruction_chars) if reader.has("rule") else "",
    )
    reader.finish()
    return trace


def _read_pass(reader: FieldReader) -> PassTrace:
    most = reader.limits.max_trace_values
    one = PassTrace(
        is_prefill=reader.flag("is_prefill"),
        tokens=reader.integers("tokens", most),
        parents=reader.integers("parents", most),
        sources=reader.names("sources", most),
        predictions=reader.integers("predictions", most),
        path=reader.integers("path", most),
        bonus=reader.integer("bonus", -(2**31), 2**31 - 1),
        draft_ms=reader.number("draft_ms"),
        pass_ms=reader.number("pass_ms"),
    )
    reader.finish()
    return one


def _read_cameras(reader: FieldReader) -> dict[str, Image]:
    child = reader.child("cameras")
    names = child.names_left()
    check_camera_names(names, reader.limits)
    cameras = {name: read_image(child, name) for name in names}
    child.finish()
    return cameras


def check_camera_names(names: list[str], limits: WireLimits) -> None:
    """Refuse too many cameras, before any of their frames is decoded."""
    if len(names) > limits.max_cameras:
        raise MessageTooLargeError(
            "cameras", f"{len(names)} of them; at most {limits.max_cameras} are taken"
        )
    for name in names:
        if not 0 < len(name) <= limits.max_name_chars or not name.isprintable():
            raise UnusableValueError(
                "cameras", f"a camera's name has 1 to {limits.max_name_chars} printable characters"
            )


def _read_raw_image(child: FieldReader, where: str) -> Image:
    limits = child.limits
    pixels = child.own_array("uint8", 3 * limits.max_image_pixels)
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise UnusableValueError(
            f"{where}.shape", f"must be [height, width, 3], got {list(pixels.shape)}"
        )
    check_image_size(pixels.shape[0], pixels.shape[1], f"{where}.shape", limits)
    return cast(Image, pixels)


def _image_fields(image: Image, encoding: ImageEncoding, quality: int) -> Fields:
    data = encode_image(image, encoding, quality)
    if encoding is not ImageEncoding.RAW:
        return {"encoding": encoding.value, "data": data}
    return {"encoding": "raw", "dtype": "uint8", "shape": list(image.shape), "data": data}


def _array_fields(array: NDArray[np.generic], dtype: str) -> Fields:
    layout = {"float32": "<f4", "float64": "<f8"}[dtype]
    return {"dtype": dtype, "shape": list(array.shape), "data": array.astype(layout).tobytes()}


def _listed(values: Fields) -> Fields:
    """Return the map with its tuples as lists."""
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }
