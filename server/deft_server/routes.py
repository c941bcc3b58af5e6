"""The HTTP routes of our own protocol: act, reset, info."""

import asyncio
import time

from fastapi import APIRouter, Request, Response

from deft_client import wire_json
from deft_server.frame_bodies import decode_body, encode_answer, is_quick, wants_msgpack
from deft_server.gate import caller_of
from deft_server.service import Service


def build_router(service: Service) -> APIRouter:
    """Return the routes around a service."""
    router = APIRouter()
    limits = service.settings.wire_limits

    async def act(request: Request) -> Response:
        body = await request.body()
        arrived_s = time.monotonic()
        content_type = request.headers.get("content-type", "")
        if is_quick(content_type, body):
            message = decode_body(content_type, body, limits)
        else:
            message = await asyncio.to_thread(decode_body, content_type, body, limits)
        caller = caller_of(request.scope)
        chunk = await service.act(message.observation, message.options, caller, arrived_s)
        as_msgpack = wants_msgpack(request.headers.get("accept", ""), content_type)
        return Response(*_split(encode_answer(chunk, as_msgpack)))

    async def reset(request: Request) -> Response:
        session_id = wire_json.decode_reset(await request.body(), limits)
        existed = service.reset(session_id, caller_of(request.scope))
        return Response(
            b'{"existed":true}' if existed else b'{"existed":false}', media_type="application/json"
        )

    async def info() -> Response:
        return Response(wire_json.encode_info(service.info), media_type="application/json")

    router.add_api_route("/v1/act", act, methods=["POST"])
    router.add_api_route("/v1/reset", reset, methods=["POST"])
    router.add_api_route("/v1/info", info, methods=["GET"])
    return router


def _split(encoded: tuple[bytes, str]) -> tuple[bytes, int, None, str]:
    return encoded[0], 200, None, encoded[1]
