"""`/v1/admin/recording`: see how the recording goes, switch it on and off; administrators only."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.routing import BaseRoute

from deft_client.errors import MalformedMessageError, UnusableValueError
from deft_server.http.gate import ADMIN_PREFIX
from deft_server.recording.files import RecordingRules
from deft_server.recording.writer import Recording, RecordingMetrics
from deft_server.serving.service import Service
from deft_server.settings import SettingsError


def build_routes(service: Service) -> Sequence[BaseRoute]:
    """Return the routes around a service; with `record` set, it records from the start."""
    recording = _build_recording(service)
    if recording is not None:
        service.on_start.append(recording.start)
        service.on_close.append(recording.stop)
    router = APIRouter()

    def told() -> JSONResponse:
        if recording is None:
            return JSONResponse({"is_on": False, "reason": "started without --record"})
        return JSONResponse(asdict(recording.status))

    async def status() -> JSONResponse:
        """Say whether frames are recorded, and why not."""
        return told()

    async def switch(request: Request) -> JSONResponse:
        """Switch the recording on or off: `{"on": true}`."""
        wanted = _wanted(await request.body())
        if recording is None:
            raise UnusableValueError("on", "start the server with --record DIR to record")
        if wanted:
            recording.start()
        else:
            await asyncio.to_thread(recording.stop)
        return told()

    path = f"{ADMIN_PREFIX}/recording"
    router.add_api_route(path, status, methods=["GET"])
    router.add_api_route(path, switch, methods=["POST"])
    return router.routes


def _build_recording(service: Service) -> Recording | None:
    settings = service.settings
    if settings.record is None:
        return None
    rules = RecordingRules(
        directory=settings.record,
        encoding=settings.record_frames,
        max_total_bytes=settings.record_max_bytes,
        min_free_bytes=settings.record_min_free_bytes,
    )
    try:
        settings.record.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"cannot record to {settings.record}: {error}") from error
    metrics = RecordingMetrics(service.metrics.registry)
    return Recording(rules, service.events, metrics, lambda: service.info)


def _wanted(body: bytes) -> bool:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError("body", f"is not JSON: {error}") from None
    wanted = said.get("on") if isinstance(said, dict) else None
    if not isinstance(wanted, bool):
        raise UnusableValueError("on", 'send {"on": true} or {"on": false}')
    return wanted
