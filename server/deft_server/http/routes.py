"""The HTTP routes of our own protocol: health, metrics, act, reset, info, and reset_all for
administrators.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from deft_client.types import ServerInfo
from deft_client.wire.json_codec import CONTENT_TYPE, decode_reset, encode_info
from deft_server.http.caller_watch import CallerWatch
from deft_server.http.frame_bodies import FrameDecoder, encode_answer, wants_msgpack
from deft_server.http.gate import ADMIN_PREFIX, caller_of
from deft_server.serving.metrics import CONTENT_TYPE as METRICS_CONTENT_TYPE
from deft_server.serving.service import Service


class PlainRoute(Route):
    """A route that is not FastAPI's, which looks for dependencies on every request.

    It leaves its name in the scope as FastAPI's routes do, for the metrics. What the OpenAPI
    document says about it is in `openapi`.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Tell whether a request is for this route."""
        match, found = super().matches(scope)
        if match is not Match.NONE:
            found["route"] = self
        return match, found


def build_health_router(service: Service) -> APIRouter:
    """Return what tells an operator how the server does."""
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
        return Response(service.metrics.page(), media_type=METRICS_CONTENT_TYPE)

    router.add_api_route("/healthz", healthz, methods=["GET"])
    router.add_api_route("/health", health, methods=["GET"])
    router.add_api_route("/readyz", readyz, methods=["GET"])
    router.add_api_route("/metrics", metrics_page, methods=["GET"])
    return router


def build_act_route(service: Service, decoder: FrameDecoder) -> PlainRoute:
    """Return the route of `POST /v1/act`."""

    async def act(request: Request) -> Response:
        """Answer one camera frame with the actions that follow it."""
        body = await request.body()
        arrived_s = time.monotonic()
        service.readiness.require()
        content_type = request.headers.get("content-type", "")
        asked = await decoder.decode(content_type, body)
        caller = caller_of(request.scope)
        chunk = await CallerWatch(request.receive).run(
            service.act(asked.observation, asked.options, caller, arrived_s),
            service.scheduler.answers_at_once,
        )
        as_msgpack = wants_msgpack(request.headers.get("accept", ""), content_type)
        content, media_type = encode_answer(chunk, as_msgpack)
        return Response(content, media_type=media_type)

    return PlainRoute("/v1/act", act, methods=["POST"])


def build_router(
    service: Service, conventions: Callable[[ServerInfo], Mapping[str, str]]
) -> APIRouter:
    """Return the other routes; `conventions` is what /v1/info tells of the peers' protocols."""
    router = APIRouter()
    limits = service.settings.wire_limits

    async def reset(request: Request) -> Response:
        """End a session: the next frame under its id starts an episode."""
        session_id = decode_reset(await request.body(), limits)
        existed = service.reset(session_id, caller_of(request.scope))
        return JSONResponse({"existed": existed})

    async def info() -> Response:
        """Say what is served: policy, action dimension, statistics keys, image size, decoding."""
        served = service.info
        told = replace(served, details={**served.details, **conventions(served)})
        return Response(encode_info(told), media_type=CONTENT_TYPE)

    async def reset_all() -> Response:
        """End every session of every caller; for administrators."""
        return JSONResponse({"ended": service.reset_all()})

    router.add_api_route("/v1/reset", reset, methods=["POST"])
    router.add_api_route("/v1/info", info, methods=["GET"])
    router.add_api_route(f"{ADMIN_PREFIX}/reset_all", reset_all, methods=["POST"])
    return router
