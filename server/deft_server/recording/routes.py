"""`/v1/admin/recording`: see how the recording goes, switch it on and off; administrators only."""

import asyncio
import json
from dataclasses import asdict

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from deft_client.errors import MalformedMessageError, UnusableValueError
from deft_server.http.gate import ADMIN_PREFIX
from deft_server.recording.writer import SessionRecording


def build_recording_router(recording: SessionRecording | None) -> APIRouter:
    """Return the routes around a recording, or those that say how to have one."""
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
    return router


def _wanted(body: bytes) -> bool:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError("body", f"is not JSON: {error}") from None
    wanted = said.get("on") if isinstance(said, dict) else None
    if not isinstance(wanted, bool):
        raise UnusableValueError("on", 'send {"on": true} or {"on": false}')
    return wanted
