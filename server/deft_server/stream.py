"""WebSocket /v1/stream: frames in, answers out, strictly alternating, msgpack as in POST /v1/act.

An error is a text frame with problem+json; the connection stays open.
"""

import asyncio
import time

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from deft_client import wire
from deft_client.errors import MalformedMessageError
from deft_server.frame_bodies import is_quick
from deft_server.gate import caller_of
from deft_server.problems import describe, problem_body
from deft_server.service import Service


def build_route(service: Service) -> WebSocketRoute:
    """Return the route around a service."""
    limits = service.settings.wire_limits

    async def answer(websocket: WebSocket, data: bytes | None) -> bytes:
        arrived_s = time.monotonic()
        if data is None:
            raise MalformedMessageError("body", "send binary frames, got text")
        if is_quick(wire.CONTENT_TYPE, data):
            message = wire.decode_request(data, limits)
        else:
            message = await asyncio.to_thread(wire.decode_request, data, limits)
        caller = caller_of(websocket.scope)
        chunk = await service.act(message.observation, message.options, caller, arrived_s)
        return wire.encode_answer(chunk)

    async def stream(websocket: WebSocket) -> None:
        await websocket.accept()
        while True:
            event = await websocket.receive()
            if event["type"] == "websocket.disconnect":
                return
            try:
                reply = await answer(websocket, event.get("bytes"))
            except WebSocketDisconnect:
                return
            except Exception as error:  # noqa: BLE001  whatever it is, the robot is told
                await websocket.send_text(problem_body(describe(error, websocket)).decode())
            else:
                await websocket.send_bytes(reply)

    return WebSocketRoute("/v1/stream", stream)
