"""The same messages as JSON, for callers without msgpack, and what only exists as JSON.

An image is `{"encoding": "png"|"jpeg"|"raw", "data": base64, ...}`; a state is a list of numbers;
actions are a list of lists.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import AnyStr, TypeVar

from deft_core.errors import MalformedMessageError, MessageTooLargeError, Problem, WireError
from deft_core.types import ActionChunk, ServerInfo
from deft_core.wire.fields import (
    DEFAULT_LIMITS,
    Json,
    Kind,
    ReadContext,
    WireLimits,
    as_map,
    unique_map,
)
from deft_core.wire.images import JPEG_QUALITY, ImageEncoding
from deft_core.wire.messages import (
    ANSWER,
    INFO,
    PROBLEM,
    REQUEST,
    RESET,
    ActMessage,
    answer_fields,
    answers_fields,
    problem_fields,
    request_fields,
)
from deft_core.wire.msgpack_codec import check_bytes

CONTENT_TYPE = "application/json"
# A problem has a dozen short members. Reading a megabyte of lists would hold up the control loop.
_OF_PROBLEMS = WireLimits(max_bytes=64 * 1024, max_lists=64, max_entries=1024)
_FEW = 100
_SHORT_BYTES = 262_144  # nothing in so short a body takes long to read; most frames are shorter
T = TypeVar("T")


def decode(kind: Kind[T], data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> T:
    """Return the message of a kind that the JSON holds, or raise `WireError`."""
    return kind.read(load(data, limits), "", ReadContext(limits, is_json=True))


def encode_request(
    message: ActMessage,
    encoding: ImageEncoding = ImageEncoding.PNG,
    quality: int = JPEG_QUALITY,
) -> bytes:
    """Return a request as JSON."""
    return _dump(request_fields(message, encoding, quality))


def decode_request(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> ActMessage:
    """Return the request in the JSON, or raise `WireError`."""
    return decode(REQUEST, data, limits)


def encode_answer(chunk: ActionChunk, message_id: str | None = None) -> bytes:
    """Return an answer as JSON; the actions are a list of lists."""
    return _dump(_answer_fields(chunk, message_id))


def encode_answers(
    answers: Sequence[ActionChunk | Problem], ids: Sequence[str | None], message_id: str | None
) -> bytes:
    """Return the answers to several observations, whose own ids those are, as JSON."""
    return _dump(answers_fields(answers, ids, message_id, _answer_fields))


def decode_answer(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> ActionChunk:
    """Return the answer in the JSON, or raise `WireError`."""
    return decode(ANSWER, data, limits)


def encode_reset(session_id: str) -> bytes:
    """Return the request that ends a session."""
    return _dump({"session_id": session_id})


def decode_reset(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> str:
    """Return the session id that a reset names, or raise `WireError`."""
    return decode(RESET, data, limits)


def encode_info(info: ServerInfo) -> bytes:
    """Return what a server says about itself as JSON."""
    maps = {name: dict(getattr(info, name)) for name in ("held_out", "versions", "details")}
    return _dump({**vars(info), **maps})


def decode_info(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> ServerInfo:
    """Return what a server says about itself; fields of later versions are passed over."""
    return decode(INFO, data, limits)


def encode_problem(problem: Problem) -> bytes:
    """Return why a request could not be answered, as application/problem+json."""
    return _dump(problem_fields(problem))


def decode_problem(status: int, data: bytes, retry_after_s: float | None = None) -> Problem:
    """Return why a request could not be answered, whatever the body is."""
    title = f"HTTP {status}"
    try:
        values = {"title": title, **as_map(load(data, _OF_PROBLEMS), "body"), "status": status}
        problem = PROBLEM.read(values, "", ReadContext(is_json=True))
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


def load(data: bytes, limits: WireLimits = DEFAULT_LIMITS, where: str = "body") -> object:
    """Return the object in the JSON, or raise `WireError` before it could grow beyond limits."""
    check_bytes(data, limits, where)
    check_json(data, limits, where)
    try:
        # Bytes that are not UTF-8 become characters that no text may hold: see fields.text.
        text = data.decode("utf-8", "surrogateescape")
        return json.loads(text, object_pairs_hook=unique_map)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError(where, f"is not JSON: {error}") from error


def check_json(data: bytes | str, limits: WireLimits, where: str = "body") -> None:
    """Refuse JSON that would take long to read, by the signs in it; texts hold few of these."""
    if len(data) <= _SHORT_BYTES:
        return
    for signs, most, what in (
        ("[{", limits.max_lists, "lists or maps"),
        (",", limits.max_entries, "entries"),
        (":.", limits.max_entries, "names or fractions"),
    ):
        if isinstance(data, str):
            count = sum(count_of(data, sign) for sign in signs)
        else:
            count = sum(count_of(data, sign.encode()) for sign in signs)
        if count > most:
            raise MessageTooLargeError(
                where, f"{count} {what}; at most {most} are taken: send images in base64"
            )


def count_of(data: AnyStr, sign: AnyStr) -> int:
    """Return what `data.count(sign)` does, much sooner where there are few of them in much data:
    `find` leaps from one to the next, `count` looks at every character."""
    at, found = data.find(sign), 0
    while at >= 0 and found < _FEW:
        at, found = data.find(sign, at + 1), found + 1
    return found if at < 0 else found + data.count(sign, at)


def _answer_fields(chunk: ActionChunk, message_id: str | None) -> Json:
    return {**answer_fields(chunk, message_id), "actions": chunk.actions.tolist()}


def _dump(entries: Json) -> bytes:
    return json.dumps(entries, default=_base64, separators=(",", ":")).encode()


def _base64(value: object) -> str:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} has no place in a message")
    return base64.b64encode(value).decode("ascii")
