"""Builds the app: a service, its protocols, and what stands around them."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute

from deft_client.image_chain import ImageChain
from deft_client.types import ServerInfo
from deft_policies.base import Policy
from deft_server.compat import act_route, socket_route
from deft_server.compat import act_route as config_route
from deft_server.compat.groot import GrootSocket
from deft_server.compat.profiles import (
    ACT_PROFILES,
    GROOT,
    OPENPI,
    VLA_EVAL,
)
from deft_server.dashboard import pages
from deft_server.http import routes, stream
from deft_server.http import routes as health
from deft_server.http.gate import Gate
from deft_server.http.openapi import describe_bodies
from deft_server.http.plain_route import PlainRoute
from deft_server.http.problems import answer_problem
from deft_server.recording import routes as recording_routes
from deft_server.serving.policy_thread import LoadPolicy
from deft_server.serving.service import Service
from deft_server.settings import Settings

Protocol = Callable[[Service], Sequence[BaseRoute]]


def peer_routes(service: Service) -> Sequence[BaseRoute]:
    """Return the routes of the peers' protocols, and have /v1/info tell their conventions."""
    settings = service.settings
    chains = {
        ACT_PROFILES[settings.profile]: settings.act_image_chain,
        OPENPI: settings.socket_image_chain,
        VLA_EVAL: settings.socket_image_chain,
    }

    def describe(info: ServerInfo) -> Mapping[str, str]:
        return {
            profile.name: profile.sentence(chain, info.image_chain)
            for profile, chain in chains.items()
        }

    service.describers.append(describe)
    return [
        *act_route.build_routes(service),
        *socket_route.build_routes(service),
        *config_route.build_config_routes(service),
    ]


def groot_socket(service: Service) -> Sequence[BaseRoute]:
    """Have GR00T's clients answered on their own port, if there is one; there are no routes."""
    settings = service.settings
    if settings.groot_port is not None:
        socket = GrootSocket(service, settings.host, settings.groot_port)
        service.on_start.append(socket.start)
        service.on_close.append(socket.stop)
        service.describers.append(
            lambda info: {GROOT.name: GROOT.sentence(ImageChain.NONE, info.image_chain)}
        )
    return []


def page_routes(service: Service) -> Sequence[BaseRoute]:
    """Return the routes of the dashboard, unless it is switched off."""
    return pages.build_routes(service) if service.settings.dashboard else []


STANDARD_PROTOCOLS: Sequence[Protocol] = (
    peer_routes,
    groot_socket,
    recording_routes.build_routes,
    page_routes,
)


class DeftApp(FastAPI):
    """The ASGI app around one service."""

    def __init__(self, service: Service, starts_loaded: bool) -> None:
        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            service.start()
            if starts_loaded:
                await service.scheduler.settled()
            yield
            await service.close()

        super().__init__(title="Deft", version=service.version, lifespan=lifespan, redoc_url=None)
        self.service = service
        self.state.service = service

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, with the bodies that our routes read as raw bytes."""
        if self.openapi_schema is None:
            document = super().openapi()
            plain = {route.path for route in self.router.routes if isinstance(route, PlainRoute)}
            describe_bodies(document, self.service.settings.wire_limits, plain)
        return super().openapi()


def create_app(
    policy: Policy | LoadPolicy,
    settings: Settings | None = None,
    protocols: Sequence[Protocol] = (),
) -> DeftApp:
    """Build the app around a policy, or around a function that loads one.

    A policy is warm before the first request is taken; a function is called on the policy thread
    while the app already answers /healthz. Protocols are lists of routes built from the service.
    """
    is_loader = callable(policy)
    load: LoadPolicy = policy if callable(policy) else lambda: policy
    service = Service(load, settings or Settings())
    app = DeftApp(service, starts_loaded=not is_loader)
    app.router.routes += [routes.build_act_route(service), stream.build_route(service)]
    app.include_router(routes.build_router(service))
    app.include_router(health.build_health_router(service))
    for protocol in protocols:
        app.router.routes.extend(protocol(service))
    app.add_exception_handler(HTTPException, answer_problem)
    if service.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    app.add_middleware(Gate, service=service)
    return app
