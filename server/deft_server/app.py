"""Builds the app from its settings: a service, its protocols, and what runs beside them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from deft_policies.base import Policy
from deft_server.compat.act_route import (
    ERRORS_HEADER,
    REASON_HEADER,
    SESSION_HEADER,
    build_config_router,
    build_peer_act_route,
)
from deft_server.compat.profiles import conventions
from deft_server.compat.socket_route import build_socket_routes
from deft_server.compat.vla0_route import build_vla0_routes
from deft_server.dashboard.pages import build_page_routes
from deft_server.http.gate import Gate
from deft_server.http.openapi import describe_bodies
from deft_server.http.problems import answer_http_exception
from deft_server.http.routes import (
    build_act_route,
    build_health_router,
    build_router,
    build_stream_route,
)
from deft_server.recording.writer import (
    SessionRecording,
    build_recording,
    build_recording_router,
)
from deft_server.serving.hosting import LoadPolicy, RemotePolicy
from deft_server.serving.service import Service
from deft_server.settings import Settings


class DeftApp(FastAPI):
    """The ASGI app around one service. With `starts_loaded`, it starts when the policy is warm."""

    def __init__(
        self,
        service: Service,
        recording: SessionRecording | None,
        starts_loaded: bool,
    ) -> None:
        self.service = service

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            service.start()
            if recording is not None:
                await run_in_threadpool(recording.start)
            if starts_loaded:
                await service.scheduler.settled()
            yield
            await service.close()
            if recording is not None:
                await run_in_threadpool(recording.stop)

        super().__init__(
            title="Deft",
            version=service.version,
            lifespan=lifespan,
            docs_url=None,
            redoc_url=None,
            telemetry={"tracing": False, "metrics": False, "logs": False},  # ours are at /metrics
        )
        self.router.redirect_slashes = False  # it would send a caller to whatever Host says

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, with the bodies that our routes read as raw bytes."""
        if self.openapi_schema is None:
            document = super().openapi()
            describe_bodies(document, self.service.settings.wire_limits)
        return super().openapi()


def create_app(
    policy: Policy | LoadPolicy | RemotePolicy, settings: Settings | None = None
) -> DeftApp:
    """Build the app around a policy, a function that loads one, or one that lives elsewhere.

    A policy is warm before the first request is taken; a function is called on the policy thread
    while the app already answers /healthz.
    """
    settings = settings or Settings()
    load: LoadPolicy | RemotePolicy = (
        policy if isinstance(policy, RemotePolicy) or callable(policy) else lambda: policy
    )
    service = Service(load, settings)
    recording = build_recording(service)
    app = DeftApp(service, recording, starts_loaded=load is not policy)
    app.router.routes += [
        build_act_route(service),
        build_stream_route(service),
        build_peer_act_route(service),
        *build_vla0_routes(service),
        *build_socket_routes(service),
        *build_page_routes(service),
    ]
    for router in (
        build_health_router(service),
        build_router(service, partial(conventions, settings)),
        build_config_router(settings),
        build_recording_router(recording),
    ):
        app.include_router(router)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_middleware(Gate, service=service)
    if settings.cors_origins:  # added last: errors of the gate are answers that a page may read
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=[
                "Authorization",
                "Content-Type",
                "X-Request-Id",
                SESSION_HEADER,
                ERRORS_HEADER,
            ],
            expose_headers=["Retry-After", "X-Request-Id", REASON_HEADER],
        )
    return app
