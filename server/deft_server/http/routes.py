"""The HTTP routes of our own protocol: act, reset, info, and what only an administrator may do."""

import time

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deft_client.wire import json_codec as wire_json
from deft_server.http.caller_watch import CallerWatch
from deft_server.http.frame_bodies import encode_answer, wants_msgpack
from deft_server.http.gate import ADMIN_PREFIX, caller_of
from deft_server.http.plain_route import PlainRoute
from deft_server.serving import metrics
from deft_server.serving.service import Service


def build_health_router(service: Service) -> APIRouter:
    """Return the routes around a service."""
    router = APIRouter()

    async def healthz() -> Response:
        """Alive, whatever the policy does. Plain text, as openpi's clients expect."""
        return PlainTextResponse("OK\n")

    async def health() -> dict[str, str]:
        """Alive, in JSON."""
        return {"status": "ok"}

    async def readyz() -> Response:
        """Ready: a frame sent now would be answered."""
        service.readiness.require_health()
        return PlainTextResponse("ready\n")

    async def metrics_page() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(service.metrics.page(), media_type=metrics.CONTENT_TYPE)

    router.add_api_route("/healthz", healthz, methods=["GET"])
    router.add_api_route("/health", health, methods=["GET"])
    router.add_api_route("/readyz", readyz, methods=["GET"])
    router.add_api_route("/metrics", metrics_page, methods=["GET"])
    return router


def build_act_route(service: Service) -> PlainRoute:
    """Return the route of `POST /v1/act`."""

    async def act(request: Request) -> Response:
        """Answer one camera frame with the actions that follow it."""
        body = await request.body()
        arrived_s = time.monotonic()
        service.readiness.require()
        content_type = request.headers.get("content-type", "")
        asked = await service.decoder.decode(content_type, body)
        caller = caller_of(request.scope)
        chunk = await CallerWatch(request.receive).run(
            service.act(asked.observation, asked.options, caller, arrived_s),
            service.scheduler.answers_at_once,
        )
        as_msgpack = wants_msgpack(request.headers.get("accept", ""), content_type)
        content, media_type = encode_answer(chunk, as_msgpack)
        return Response(content, media_type=media_type)

    return PlainRoute("/v1/act", act, methods=["POST"])


def build_router(service: Service) -> APIRouter:
    """Return the other routes."""
    router = APIRouter()
    limits = service.settings.wire_limits

    async def reset(request: Request) -> Response:
        """End a session: the next frame under its id starts an episode."""
        session_id = wire_json.decode_reset(await request.body(), limits)
        existed = service.reset(session_id, caller_of(request.scope))
        return JSONResponse({"existed": existed})

    async def info() -> Response:
        """Say what is served: policy, action dimension, statistics keys, image size, decoding."""
        return Response(wire_json.encode_info(service.info), media_type=wire_json.CONTENT_TYPE)

    async def reset_all() -> Response:
        """End every session of every caller; for administrators."""
        return JSONResponse({"ended": service.reset_all()})

    router.add_api_route("/v1/reset", reset, methods=["POST"])
    router.add_api_route("/v1/info", info, methods=["GET"])
    router.add_api_route(f"{ADMIN_PREFIX}/reset_all", reset_all, methods=["POST"])
    return router
