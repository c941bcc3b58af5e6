"""Builds the app: a service, its protocols, and what stands around them."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute

from deft_policies.base import Policy
from deft_server import health, routes, stream
from deft_server.gate import Gate
from deft_server.openapi import describe_bodies
from deft_server.plain_route import PlainRoute
from deft_server.policy_thread import LoadPolicy
from deft_server.problems import answer_problem
from deft_server.service import Service
from deft_server.settings import Settings

Protocol = Callable[[Service], Sequence[BaseRoute]]


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
    app.include_router(health.build_router(service))
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
