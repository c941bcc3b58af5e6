"""`POST /predict_base64` and `/predict_base64_stream` as VLA-0's server answers its clients.

Rows are in the order of the plain endpoint. They leave together, once the answer is known to be
valid: a text that breaks off is no action from its first row on. These clients know no sessions, so
that a caller's address and key stand for one. Errors are problems with a status, as everywhere.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from deft_client.peers.openvla import NotAnObjectError, decode_json
from deft_client.peers.vla0 import encode_actions, encode_rows, vla0_request
from deft_client.types import ActionChunk
from deft_client.wire.fields import WireLimits
from deft_client.wire.messages import ActMessage
from deft_server.compat.profiles import staying
from deft_server.http.frame_bodies import read_body
from deft_server.http.gate import caller_of
from deft_server.http.routes import PlainRoute
from deft_server.http.watches import CallerWatch
from deft_server.serving.service import Service

PATH = "/predict_base64"


def build_vla0_routes(service: Service) -> list[PlainRoute]:
    """Return the two routes around a service."""

    def whole(chunk: ActionChunk, took_s: float) -> Response:
        return Response(encode_actions(chunk), media_type="application/json")

    def rows(chunk: ActionChunk, took_s: float) -> Response:
        return Response(b"".join(encode_rows(chunk, took_s)), media_type="application/x-ndjson")

    return [_build(service, PATH, whole), _build(service, f"{PATH}_stream", rows)]


def _build(
    service: Service, path: str, respond: Callable[[ActionChunk, float], Response]
) -> PlainRoute:
    limits = service.settings.wire_limits

    async def predict(request: Request) -> Response:
        """Answer a client of VLA-0; see docs/protocols.md."""
        body = await read_body(request.receive)
        arrived_s = time.monotonic()
        caller = staying(caller_of(request.scope))

        async def answer() -> ActionChunk:
            await service.admit(caller)
            message = await service.threads.run(partial(_decode, body, limits))
            options = replace(message.options, session_id=f"vla0-{caller.address}")
            return await service.act(message.observation, options, caller, arrived_s)

        chunk = await CallerWatch(request.receive).run(answer())
        return respond(chunk, time.monotonic() - arrived_s)

    return PlainRoute(path, predict, methods=["POST"])


def _decode(body: bytes, limits: WireLimits) -> ActMessage:
    fields = decode_json(body, limits)
    if not isinstance(fields, dict):
        raise NotAnObjectError(fields)
    return vla0_request(fields, limits)
