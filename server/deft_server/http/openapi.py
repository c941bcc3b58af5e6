"""The request and response bodies of the OpenAPI document.

The routes take raw bytes, because nothing may stand between a frame and its decoding; so what the
bytes must be is added here, from the structs that they are decoded into.
"""

from collections.abc import Collection
from typing import Any

import msgspec

from deft_core.errors import Problem
from deft_core.types import ServerInfo, StageTimings
from deft_core.wire.limits import WireLimits
from deft_core.wire.messages import ActAnswer, ActAnswers, ActRequest, ActRequests, Reset

Json = dict[str, Any]
_MESSAGES = (
    *(ActRequest, ActRequests, ActAnswer, ActAnswers, StageTimings),
    *(Reset, ServerInfo, Problem),
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


def describe_bodies(document: Json, limits: WireLimits) -> None:
    """Add the bodies of our routes to a document that FastAPI made, and the plain routes to it."""
    _child(_child(document, "components"), "schemas").update(_schemas(limits))
    paths = _child(document, "paths")

    def describe(
        path: str,
        method: str,
        answer: Json,
        errors: Collection[str] = _REFUSALS,
        body: Json | None = None,
        summary: str = "",  # where FastAPI does not know the route
    ) -> None:
        described = _child(_child(paths, path), method)
        if body is not None:
            described["requestBody"] = body
        if summary:
            described["summary"] = summary
        problem: Json = {"application/problem+json": {"schema": _reference("Problem")}}
        responses: Json = {"200": {"description": "done", "content": answer}}
        for status in errors:
            responses[status] = {"description": _ERRORS[status], "content": problem}
        described["responses"] = responses

    text = _content({"text/plain": _TEXT})
    either = {"anyOf": [_reference("ActAnswer"), _reference("ActAnswers")]}
    answers = _content({"application/json": either, "application/msgpack": _BINARY})
    status, switch = _json("RecordingStatus"), _body(_json("RecordingSwitch"))
    describe("/v1/act", "post", answers, _ERRORS, _act_body(), _ACT)
    legacy = _body(_json("LegacyAct"))
    describe("/act", "post", _json("Anything"), ("401", "413"), legacy, _LEGACY_ACT)
    for path in ("/predict_base64", "/predict_base64_stream"):
        describe(path, "post", _json("Anything"), body=legacy, summary=_VLA0)
    describe("/v1/reset", "post", _json("WasReset"), body=_body(_json("Reset")))
    describe("/v1/info", "get", _json("ServerInfo"))
    describe("/v1/admin/reset_all", "post", _json("Ended"))
    describe("/v1/admin/recording", "get", status)
    describe("/v1/admin/recording", "post", status, body=switch)
    describe("/healthz", "get", text, ())
    describe("/readyz", "get", text, ("503",))
    describe("/metrics", "get", text, ("401",))


_ACT = "Answer one observation, or several, with the actions that follow."
_VLA0 = "Answer a client of VLA-0; see docs/protocols.md."
_LEGACY_ACT = "Answer a client of OpenVLA; errors are the text `error`, see docs/protocols.md."
_BINARY: Json = {"type": "string", "format": "binary"}
_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer"}


def _act_body() -> Json:
    content = _content(
        {
            "application/json": {"anyOf": [_reference("ActRequest"), _reference("ActRequests")]},
            "multipart/form-data": _reference("ActForm"),
            "application/msgpack": _BINARY,
        }
    )
    form = _child(content, "multipart/form-data")
    form["encoding"] = {"image": {"contentType": "image/png, image/jpeg"}}
    return _body(content)


def _body(content: Json) -> Json:
    return {"required": True, "content": content}


def _json(schema: str) -> Json:
    return _content({"application/json": _reference(schema)})


def _content(schemas: dict[str, Json]) -> Json:
    return {media_type: {"schema": schema} for media_type, schema in schemas.items()}


def _schemas(limits: WireLimits) -> Json:
    return {**_messages(limits), **_other_bodies()}


def _messages(limits: WireLimits) -> Json:
    """Return the schemas of our messages; msgspec does not see what a part left undecoded is."""
    references = "#/components/schemas/{name}"
    _, schemas = msgspec.json.schema_components(_MESSAGES, ref_template=references)
    request = schemas["ActRequest"]["properties"]
    request["instruction"]["maxLength"] = limits.max_instruction_chars
    observations = schemas["ActRequests"]["properties"]["observations"]
    observations["items"] = _reference("ActRequest")
    observations["maxItems"] = limits.max_observations
    either = {"anyOf": [_reference("ActAnswer"), _reference("Problem")]}
    schemas["ActAnswers"]["properties"]["answers"]["items"] = either
    schemas["ActAnswer"]["properties"]["timings"] = _reference("StageTimings")
    fields = {name: field for name, field in request.items() if name != "cameras"}
    fields |= {"image": _BINARY, "state": _TEXT}
    return {**schemas, "ActForm": _object(fields, ("image", "instruction"), open_ended=True)}


def _other_bodies() -> Json:
    array = {"__numpy__": _TEXT, "dtype": _TEXT, "shape": {"type": "array", "items": _COUNT}}
    legacy = {"image": _object(array, tuple(array)), "instruction": _TEXT, "unnorm_key": _TEXT}
    return {
        "Anything": {},
        "LegacyAct": _object(legacy, ("image", "instruction"), open_ended=True),
        "WasReset": _object({"existed": {"type": "boolean"}}, ("existed",)),
        "Ended": _object({"ended": _COUNT}, ("ended",)),
        "RecordingSwitch": _object({"on": {"type": "boolean"}}, ("on",)),
        "RecordingStatus": _object(
            {"is_on": {"type": "boolean"}, "reason": {"type": "string"}},
            ("is_on", "reason"),
            open_ended=True,
        ),
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
