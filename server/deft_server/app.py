"""Builds the app: a service, its protocols, and what stands around them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from deft_client.errors import WireError
from deft_policies.base import Policy
from deft_policies.errors import PolicyError
from deft_server import health, routes, stream
from deft_server.errors import ServerError
from deft_server.gate import Gate
from deft_server.policy_thread import LoadPolicy
from deft_server.problems import answer_problem
from deft_server.service import Service
from deft_server.settings import Settings

Protocol = Callable[[Service], list[BaseRoute]]


def create_app(
    policy: Policy | LoadPolicy,
    settings: Settings | None = None,
    protocols: tuple[Protocol, ...] = (),
) -> FastAPI:
    """Build the app around a policy, or around a function that loads one.

    A loaded policy is warm before the first request is taken; a function is called on the policy
    thread while the app already answers /healthz. `app.state.service` is the `Service`.
    """
    load: LoadPolicy = policy if callable(policy) else lambda: policy
    service = Service(load, settings or Settings())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.scheduler.start()
        if not callable(policy):
            await service.scheduler.settled()
        yield
        await service.scheduler.close()

    app = FastAPI(title="Deft", lifespan=lifespan)
    app.state.service = service
    app.include_router(routes.build_router(service))
    app.include_router(health.build_router(service))
    app.router.routes.append(stream.build_route(service))
    for protocol in protocols:
        app.router.routes.extend(protocol(service))
    for known in (ServerError, WireError, PolicyError, HTTPException, Exception):
        app.add_exception_handler(known, answer_problem)
    app.add_middleware(Gate, service=service)
    return app
