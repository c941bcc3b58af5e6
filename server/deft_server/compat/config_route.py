"""`GET /config` as vla-eval's tools read it. What it shows is set when the server starts."""

from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.routing import BaseRoute

from deft_server.service import Service


def build_routes(service: Service) -> Sequence[BaseRoute]:
    """Return the route around a service."""
    router = APIRouter()
    settings = service.settings

    async def config(request: Request) -> JSONResponse:
        """Show the batching settings; an attempt to change them is refused with the reason."""
        current = {
            "max_batch_size": settings.max_batch,
            "max_wait_time": settings.max_wait_ms / 1000,
        }
        errors = [
            f"{name} is set when the server starts (--max-batch, --max-wait-ms)"
            if name in current
            else f"unknown key: {name}"
            for name in request.query_params
        ]
        if errors:
            return JSONResponse({"errors": errors}, status_code=422)
        return JSONResponse({"applied": {}, "config": current})

    router.add_api_route("/config", config, methods=["GET"])
    return router.routes
