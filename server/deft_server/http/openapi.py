"""The request and response bodies of the OpenAPI document.

The routes take raw bytes, because nothing may stand between a frame and its decoding; so what the
bytes must be is added here, from the kinds that read them.
"""

from collections.abc import Collection
from dataclasses import dataclass

from deft_client.wire.fields import SENTENCE, Json, WireLimits
from deft_client.wire.messages import (
    ANSWER,
    ANSWERS,
    INFO,
    OPTIONS,
    PROBLEM,
    REQUEST,
    REQUESTS,
    RESET,
)

_ERRORS = {
    "400": "malformed message",
    "401": "API key needed",
    "403": "not allowed",
    "408": "the body took too long",
    "409": "superseded by a newer frame of the session",
    "413": "too large",
    "415": "unsupported content type or encoding",
    "422": "a value that cannot be used; `field` names it",
    "429": "too many requests; see Retry-After",
    "500": "the policy failed; quote the request id",
    "503": "not ready; see Retry-After",
    "504": "the deadline cannot be, or was not, met",
}
_REFUSALS = ("400", "401", "403", "408", "413", "415", "422", "429", "500", "503")


@dataclass(frozen=True)
class _Operation:
    path: str
    method: str
    answer: str | None  # the schema of a JSON answer; None where it is plain text
    errors: tuple[str, ...] = _REFUSALS
    body: Json | None = None
    summary: str = ""  # where FastAPI does not know the route


def describe_bodies(document: Json, limits: WireLimits, plain: Collection[str]) -> None:
    """Add the bodies of our routes to a document that FastAPI made, and the plain routes to it."""
    _child(_child(document, "components"), "schemas").update(_schemas(limits))
    reset_body = _body({"application/json": _reference("Reset")})
    switch_body = _body({"application/json": _reference("RecordingSwitch")})
    operations = [
        _Operation("/v1/act", "post", "ActAnswer", tuple(_ERRORS), _act_body(), _ACT),
        _Operation("/act", "post", "Anything", ("401", "413"), _legacy_body(), _LEGACY_ACT),
        _Operation("/v1/reset", "post", "WasReset", body=reset_body),
        _Operation("/v1/info", "get", "ServerInfo"),
        _Operation("/v1/admin/reset_all", "post", "Ended"),
        _Operation("/v1/admin/recording", "get", "RecordingStatus"),
        _Operation("/v1/admin/recording", "post", "RecordingStatus", body=switch_body),
        _Operation("/healthz", "get", None, ()),
        _Operation("/readyz", "get", None, ("503",)),
        _Operation("/metrics", "get", None, ("401",)),
    ]
    paths = _child(document, "paths")
    for operation in operations:
        if operation.path not in paths and operation.path not in plain:
            continue
        _describe(_child(_child(paths, operation.path), operation.method), operation)


def _describe(described: Json, operation: _Operation) -> None:
    if operation.body is not None:
        described["requestBody"] = operation.body
    if operation.summary:
        described["summary"] = operation.summary
    content: Json = {"text/plain": {"schema": _TEXT}}
    if operation.answer is not None:
        content = {"application/json": {"schema": _reference(operation.answer)}}
    if operation.answer == "ActAnswer":
        either = {"anyOf": [_reference("ActAnswer"), _reference("ActAnswers")]}
        content = {"application/json": {"schema": either}}
        content["application/msgpack"] = {"schema": _BINARY}
    problem: Json = {"application/problem+json": {"schema": _reference("Problem")}}
    responses: Json = {"200": {"description": "done", "content": content}}
    for status in operation.errors:
        responses[status] = {"description": _ERRORS[status], "content": problem}
    described["responses"] = responses


_ACT = "Answer one observation, or several, with the actions that follow."
_LEGACY_ACT = "Answer a client of OpenVLA; errors are the text `error`, see docs/protocols.md."
_BINARY: Json = {"type": "string", "format": "binary"}
_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer"}


def _act_body() -> Json:
    body = _body(
        {
            "application/json": {"anyOf": [_reference("ActRequest"), _reference("ActRequests")]},
            "multipart/form-data": _reference("ActForm"),
            "application/msgpack": _BINARY,
        }
    )
    content = _child(body, "content")
    form = _child(content, "multipart/form-data")
    form["encoding"] = {"image": {"contentType": "image/png, image/jpeg"}}
    return body


def _legacy_body() -> Json:
    return _body({"application/json": _reference("LegacyAct")})


def _body(schemas: dict[str, Json]) -> Json:
    content = {media_type: {"schema": schema} for media_type, schema in schemas.items()}
    return {"required": True, "content": content}


def _schemas(limits: WireLimits) -> Json:
    options = {name: kind.schema(limits) for name, kind in OPTIONS.items()}
    form = {"image": _BINARY, "instruction": SENTENCE.schema(limits), "state": _TEXT, **options}
    array = {"__numpy__": _TEXT, "dtype": _TEXT, "shape": {"type": "array", "items": _COUNT}}
    legacy = {"image": _object(array, tuple(array)), "instruction": _TEXT, "unnorm_key": _TEXT}
    return {
        "Anything": {},
        "LegacyAct": _object(legacy, ("image", "instruction"), open_ended=True),
        "ActRequest": REQUEST.schema(limits),
        "ActRequests": REQUESTS.schema(limits),
        "ActForm": _object(form, ("image", "instruction"), open_ended=True),
        "ActAnswer": ANSWER.schema(limits),
        "ActAnswers": ANSWERS.schema(limits),
        "Reset": RESET.schema(limits),
        "WasReset": _object({"existed": {"type": "boolean"}}, ("existed",)),
        "Ended": _object({"ended": _COUNT}, ("ended",)),
        "RecordingSwitch": _object({"on": {"type": "boolean"}}, ("on",)),
        "RecordingStatus": _object(
            {"is_on": {"type": "boolean"}, "reason": {"type": "string"}},
            ("is_on", "reason"),
            open_ended=True,
        ),
        "ServerInfo": INFO.schema(limits),
        "Problem": PROBLEM.schema(limits),
    }


def _object(properties: Json, required: tuple[str, ...], open_ended: bool = False) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": open_ended,
    }


def _reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _child(parent: Json, name: str) -> Json:
    """Return the map under a name, made if need be."""
    child = parent.setdefault(name, {})
    assert isinstance(child, dict)
    return child
