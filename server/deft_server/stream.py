"""WebSocket /v1/stream: frames in, answers out, strictly alternating, msgpack as in POST /v1/act.

An error is a text frame with problem+json; the connection stays open.
"""

import time

from starlette.routing import WebSocketRoute
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from deft_client import wire
from deft_client.errors import MalformedMessageError
from deft_client.types import ActionChunk
from deft_server.caller_watch import CallerWatch
from deft_server.errors import CallerGoneError
from deft_server.gate import caller_of
from deft_server.problems import describe, problem_body
from deft_server.service import Service

PATH = "/v1/stream"


def build_route(service: Service) -> WebSocketRoute:
    """Return the route around a service."""

    async def act(websocket: WebSocket, message: Message) -> ActionChunk:
        arrived_s = time.monotonic()
        data = message.get("bytes")
        if data is None:
            raise MalformedMessageError("body", "send binary frames, got text")
        service.readiness.require()
        asked = await service.decoder.decode(wire.CONTENT_TYPE, data)
        caller = caller_of(websocket.scope)
        return await service.act(asked.observation, asked.options, caller, arrived_s)

    async def stream(websocket: WebSocket) -> None:
        await websocket.accept()
        watch = CallerWatch(websocket.receive)
        while True:
            message = await watch.next_message()
            if message["type"] == "websocket.disconnect":
                return
            with service.in_hand():
                try:
                    chunk = await watch.run(act(websocket, message))
                    await websocket.send_bytes(wire.encode_answer(chunk))
                except (CallerGoneError, WebSocketDisconnect):
                    return
                except Exception as error:  # noqa: BLE001  whatever it is, the robot is told
                    problem = problem_body(describe(error, websocket))
                    await websocket.send_text(problem.decode())

    return WebSocketRoute(PATH, stream)
