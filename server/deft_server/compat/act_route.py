"""`POST /act` as OpenVLA's `deploy.py` answers it, to the byte; OpenVLA-OFT's form on request.

A legacy client gets the JSON text "error" with status 200 for every failure, because that is
what it looks for. With the header `X-Deft-Errors: problem` it gets a real status and a reason.
"""

import json
import time
from dataclasses import replace
from functools import partial

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.responses import Response

from deft_core.errors import WireError
from deft_core.peers.arrays import read_name
from deft_core.peers.conventions import CONVENTIONS
from deft_core.peers.openvla import (
    ActBody,
    NotAnObjectError,
    NotJsonError,
    decode_act_body,
    encode_reply,
    oft_request,
    openvla_request,
)
from deft_core.types import ActionChunk
from deft_core.wire.formats import count_of
from deft_core.wire.limits import ReadContext
from deft_core.wire.messages import ActMessage
from deft_policies.errors import PolicyError
from deft_server.compat.profiles import prepared, staying
from deft_server.errors import CallerGoneError, ServerError
from deft_server.http.frame_bodies import read_body
from deft_server.http.gate import caller_of, exchange_of
from deft_server.http.problems import describe
from deft_server.http.routes import PlainRoute
from deft_server.http.watches import CallerWatch
from deft_server.serving.access import Caller
from deft_server.serving.service import Service
from deft_server.settings import ActProfile, Settings


def build_config_router(settings: Settings) -> APIRouter:
    """Return the route that tells how frames are batched."""
    router = APIRouter()

    async def config(request: Request) -> JSONResponse:
        """Show the batching settings; an attempt to change them is refused with the reason."""
        current = {
            "max_batch_size": settings.max_batch,
            "max_wait_time": 0.0,  # a batch starts as soon as the policy is free
        }
        errors = [
            f"{name} is set when the server starts (--max-batch)"
            if name in current
            else f"unknown key: {name}"
            for name in request.query_params
        ]
        if errors:
            return JSONResponse({"errors": errors}, status_code=422)
        return JSONResponse({"applied": {}, "config": current})

    router.add_api_route("/config", config, methods=["GET"])
    return router


PATH = "/act"
ERRORS_HEADER = "x-deft-errors"
SESSION_HEADER = "x-deft-session"
REASON_HEADER = "x-deft-reason"
_ECHOED_CHARS = 200
# A picture in base64 is one value and read within a millisecond, less than a thread costs to ask.
_QUICK_BYTES = 1024 * 1024
_QUICK_VALUES = 1000
_READERS = {"openvla": openvla_request, "oft": oft_request}


def build_peer_act_route(service: Service) -> PlainRoute:
    """Return the route around a service."""
    limits = service.settings.wire_limits
    profile, chain = service.settings.profile, service.settings.act_image_chain

    async def answer(request: Request, body: bytes, caller: Caller, arrived_s: float) -> bytes:
        await service.admit(caller)
        context = ReadContext(limits, hold=exchange_of(request.scope).hold)
        decode = partial(_decode, body, profile, context)
        parsed, message = decode() if _is_quick(body) else await service.threads.run(decode)
        session = read_name(request.headers.get(SESSION_HEADER), SESSION_HEADER, limits)
        message = await prepared(message, chain, service)
        options = replace(message.options, session_id=session)
        chunk = await service.act(message.observation, options, caller, arrived_s, is_peers=True)
        return _reply(chunk, profile, parsed.is_encoded)

    async def act(request: Request) -> Response:
        """Answer an OpenVLA client; see docs/protocols.md."""
        body = await read_body(request.receive)
        arrived_s = time.monotonic()
        caller = caller_of(request.scope)
        if not _wants_problems(request):  # a client that understands a status tries again itself
            caller = staying(caller)
        try:
            _require_json(request.headers.get("content-type", ""), body)
            work = answer(request, body, caller, arrived_s)
            return _json(await CallerWatch(request.receive).run(work))
        except CallerGoneError:
            raise
        except (WireError, PolicyError, ServerError) as error:
            if _wants_problems(request):
                raise
            return _legacy_error(error, request)

    return PlainRoute(PATH, act, methods=["POST"])


class _NoBodyError(NotAnObjectError):
    """The body is empty."""


def _decode(body: bytes, profile: ActProfile, context: ReadContext) -> tuple[ActBody, ActMessage]:
    parsed = decode_act_body(body, context.limits)
    return parsed, _READERS[profile](parsed.fields, context)


def _is_quick(body: bytes) -> bool:
    """Whether reading it holds nobody up: what takes long is a list of very many numbers."""
    return len(body) < _QUICK_BYTES and count_of(body, b",") < _QUICK_VALUES


def _require_json(content_type: str, body: bytes) -> None:
    """Treat a body that is not declared as JSON the way FastAPI does: as text."""
    if not body:
        raise _NoBodyError(None)
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and "+json" in kind):
        raise NotAnObjectError(body.decode("utf-8", "replace"))


def _wants_problems(request: Request) -> bool:
    return request.headers.get(ERRORS_HEADER) == "problem"


def _reply(chunk: ActionChunk, profile: ActProfile, is_encoded: bool) -> bytes:
    actions = CONVENTIONS[profile].from_policy(chunk.actions)
    if profile == "oft":
        return encode_reply(list(actions), is_encoded)
    return encode_reply(actions[0], is_encoded)


def _legacy_error(error: Exception, request: Request) -> Response:
    """Return what the peer's server would have, with the reason in a header for people."""
    if isinstance(error, NotJsonError | NotAnObjectError):
        return _json(json.dumps({"detail": [_detail(error)]}, separators=(",", ":")).encode(), 422)
    problem = describe(error, request)
    response = _json(b'"error"')
    response.headers[REASON_HEADER] = ascii(f"{problem.status} {problem.detail}")[1:-1][:300]
    return response


def _detail(error: NotJsonError | NotAnObjectError) -> dict[str, object]:
    """Return the validation error that FastAPI gives for the same body."""
    if isinstance(error, NotJsonError):
        return {
            "type": "json_invalid",
            "loc": ["body", error.position],
            "msg": "JSON decode error",
            "input": {},
            "ctx": {"error": error.reason},
        }
    if isinstance(error, _NoBodyError):
        return {"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}
    return {
        "type": "dict_type",
        "loc": ["body"],
        "msg": "Input should be a valid dictionary",
        "input": _echo(error.value),
    }


def _echo(value: object) -> object:
    """Return what arrived, if it is short plain JSON; a long body is not sent back."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None
    return value if len(text) <= _ECHOED_CHARS else text[:_ECHOED_CHARS]


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")
