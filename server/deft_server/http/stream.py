"""WebSocket /v1/stream: frames in, answers out, strictly alternating, msgpack as in POST /v1/act.

An error is a text message with problem+json; the connection stays open. Plain ASGI, because every
frame of a robot comes this way.
"""

import time

from starlette.requests import HTTPConnection
from starlette.routing import WebSocketRoute
from starlette.types import Message, Receive, Scope, Send

from deft_client.errors import MalformedMessageError
from deft_client.types import ActionChunk
from deft_client.wire.json_codec import encode_problem
from deft_client.wire.msgpack_codec import CONTENT_TYPE, encode_answer
from deft_server.errors import CallerGoneError
from deft_server.http.caller_watch import CallerWatch
from deft_server.http.frame_bodies import FrameDecoder
from deft_server.http.gate import caller_of
from deft_server.http.problems import describe
from deft_server.serving.access import Caller
from deft_server.serving.service import Service

PATH = "/v1/stream"


def build_stream_route(service: Service, decoder: FrameDecoder) -> WebSocketRoute:
    """Return the route around a service."""
    return WebSocketRoute(PATH, _Stream(service, decoder))


class _Stream:
    """The route, as an ASGI application: called once per connection."""

    def __init__(self, service: Service, decoder: FrameDecoder) -> None:
        self._service = service
        self._decoder = decoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer frames until the robot leaves."""
        await receive()  # websocket.connect
        await send({"type": "websocket.accept"})
        watch = CallerWatch(receive)
        try:
            while (message := await watch.next_message())["type"] != "websocket.disconnect":
                with self._service.in_hand():
                    await send(await self._answer(message, watch, scope))
        except (CallerGoneError, OSError):  # OSError: the robot left while we sent
            return

    async def _answer(self, message: Message, watch: CallerWatch, scope: Scope) -> Message:
        """Return the message to send back."""
        try:
            is_quick = self._service.scheduler.answers_at_once
            chunk = await watch.run(self._act(message, caller_of(scope)), is_quick)
            return {"type": "websocket.send", "bytes": encode_answer(chunk)}
        except CallerGoneError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, the robot is told
            problem = encode_problem(describe(error, HTTPConnection(scope)))
            return {"type": "websocket.send", "text": problem.decode()}

    async def _act(self, message: Message, caller: Caller) -> ActionChunk:
        arrived_s = time.monotonic()
        data = message.get("bytes")
        if data is None:
            raise MalformedMessageError("body", "send binary frames, got text")
        self._service.readiness.require()
        asked = await self._decoder.decode(CONTENT_TYPE, data)
        return await self._service.act(asked.observation, asked.options, caller, arrived_s)
