"""Is the server alive, is it ready, and how is it doing: for load balancers and Prometheus."""

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from deft_server import metrics
from deft_server.service import Service


def build_router(service: Service) -> APIRouter:
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
