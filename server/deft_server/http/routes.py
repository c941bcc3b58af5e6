"""The routes of our own protocol: health and metrics, act, reset and info, and the stream.

The stream is a WebSocket: frames in, answers out, strictly alternating, msgpack as in POST
/v1/act. An error is a text message with problem+json; the connection stays open. Every frame comes
by act or the stream, so these two are routes of Starlette, without FastAPI's work for each request.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import Message, Receive, Scope, Send

from deft_core.errors import MalformedMessageError, Problem, WireError
from deft_core.types import ActionChunk, ServerInfo
from deft_core.wire.codec import (
    decode_reset,
    encode_answer,
    encode_answers,
    encode_info,
    encode_problem,
)
from deft_core.wire.formats import WireFormat
from deft_core.wire.limits import ReadContext
from deft_core.wire.messages import ActMessage, ActMessages
from deft_server.errors import CallerGoneError
from deft_server.http.frame_bodies import decode_frame, read_body, wants_msgpack
from deft_server.http.gate import ADMIN_PREFIX, caller_of, exchange_of, take_exchange
from deft_server.http.problems import describe
from deft_server.http.watches import CallerWatch
from deft_server.serving.bounds import Exchange
from deft_server.serving.metrics import CONTENT_TYPE as METRICS_CONTENT_TYPE
from deft_server.serving.service import Service


class PlainRoute(Route):
    """A route of Starlette's: FastAPI's would resolve dependencies on every request.

    It leaves its name in the scope as FastAPI's routes do, for the metrics. What the OpenAPI
    document says about it is in `openapi`.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Tell whether a request is for this route."""
        match, found = super().matches(scope)
        if match is not Match.NONE:
            found["route"] = self
        return match, found


def build_health_router(service: Service) -> APIRouter:
    """Return what tells an operator how the server does."""
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
        return Response(service.metrics.page(), media_type=METRICS_CONTENT_TYPE)

    router.add_api_route("/healthz", healthz, methods=["GET"])
    router.add_api_route("/health", health, methods=["GET"])
    router.add_api_route("/readyz", readyz, methods=["GET"])
    router.add_api_route("/metrics", metrics_page, methods=["GET"])
    return router


def build_act_route(service: Service) -> PlainRoute:
    """Return the route of `POST /v1/act`."""
    limits = service.settings.wire_limits

    async def act(request: Request) -> Response:
        """Answer one observation, or several, with the actions that follow."""
        # In a list, so that decoding takes the only reference and the body is freed early.
        received = [await read_body(request.receive)]
        arrived_s = time.monotonic()
        content_type = request.headers.get("content-type", "")
        caller = caller_of(request.scope)
        as_msgpack = wants_msgpack(request.headers.get("accept", ""), content_type)
        wire_format = WireFormat.MSGPACK if as_msgpack else WireFormat.JSON

        async def answer() -> bytes:
            await service.admit(caller)
            context = ReadContext(limits, hold=exchange_of(request.scope).hold)
            message = await decode_frame(service.threads, context, content_type, received.pop())
            return await _answered(service, message, request, arrived_s, wire_format)

        content = await CallerWatch(request.receive).run(answer())
        return Response(content, media_type=wire_format.value)

    return PlainRoute("/v1/act", act, methods=["POST"])


async def _answered(
    service: Service,
    message: ActMessage | ActMessages,
    connection: HTTPConnection,
    arrived_s: float,
    wire_format: WireFormat,
) -> bytes:
    """Return the answer to an observation, or those to several, which may share a batch."""
    caller = caller_of(connection.scope)
    if isinstance(message, ActMessage):
        chunk = await service.act(message.observation, message.options, caller, arrived_s)
        return encode_answer(chunk, message.id, wire_format)

    async def answer(each: ActMessage | WireError, is_admitted: bool) -> ActionChunk | Problem:
        try:
            if not is_admitted:
                await service.admit(caller)
            if isinstance(each, WireError):
                service.metrics.count_outcome(caller.name, each)
                raise each
            return await service.act(each.observation, each.options, caller, arrived_s)
        except Exception as error:  # noqa: BLE001  whatever it is, the others are answered
            return describe(error, connection)

    # The first was admitted with the message.
    answering = [answer(each, number == 0) for number, each in enumerate(message.each)]
    answers = await asyncio.gather(*answering)
    ids = [each.id if isinstance(each, ActMessage) else None for each in message.each]
    return encode_answers(answers, ids, message.id, wire_format)


def build_router(
    service: Service, conventions: Callable[[ServerInfo], Mapping[str, str]]
) -> APIRouter:
    """Return the other routes; `conventions` is what /v1/info tells of the peers' protocols."""
    router = APIRouter()
    limits = service.settings.wire_limits

    async def reset(request: Request) -> Response:
        """End a session: the next frame under its id starts an episode."""
        session_id = decode_reset(await request.body(), limits)
        existed = service.reset(session_id, caller_of(request.scope))
        return JSONResponse({"existed": existed})

    async def info() -> Response:
        """Say what is served: policy, action dimension, statistics keys, image size, decoding."""
        served = service.info
        shown = replace(served, details={**served.details, **conventions(served)})
        return Response(encode_info(shown), media_type=WireFormat.JSON.value)

    async def reset_all() -> Response:
        """End every session of every caller; for administrators."""
        return JSONResponse({"ended": service.reset_all()})

    router.add_api_route("/v1/reset", reset, methods=["POST"])
    router.add_api_route("/v1/info", info, methods=["GET"])
    router.add_api_route(f"{ADMIN_PREFIX}/reset_all", reset_all, methods=["POST"])
    return router


STREAM_PATH = "/v1/stream"
_CLOSE_REASON = "Internal server error. Details in the previous frame."


def build_stream_route(service: Service) -> WebSocketRoute:
    """Return the route around a service."""
    return WebSocketRoute(STREAM_PATH, partial(_Stream, service))


class RobotSocket(ABC):
    """A robot's WebSocket: messages in and answers out, strictly alternating, until it leaves.

    Made and awaited once per connection, as routes do with a class. What is answered, and how an
    error is reported, is each protocol's own.
    """

    body_name = "frame"  # what errors call a message
    survives_errors = True
    exchange: Exchange  # of the message that is being answered

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        self.service = service
        self.limits = service.settings.wire_limits
        self.connection = HTTPConnection(scope)
        self.caller = caller_of(scope)
        self._receive = receive
        self._send = send

    async def greeting(self) -> bytes | None:
        """Return the first message, if there is one; where it raises, the connection ends."""
        return None

    @abstractmethod
    async def answer(self, data: bytes, arrived_s: float) -> bytes | None:
        """Return the answer to a message, if it has one."""

    @abstractmethod
    async def send_error(self, problem: Problem) -> None:
        """Send why a message has no answer."""

    def read_context(self) -> ReadContext:
        """Return how to read the message that is being answered."""
        return ReadContext(self.limits, hold=self.exchange.hold)

    def end_episode(self) -> None:  # noqa: B027  ours remembers by the frame's session
        """Forget what is known of the robot; called when the connection ends, too."""

    def __await__(self) -> Generator[Any, None, None]:
        """Serve the connection."""
        return self._serve().__await__()

    async def _serve(self) -> None:
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept"})
        watch = CallerWatch(self._receive)
        try:
            goes_on = await self._reply(self.greeting())
            while goes_on:
                message = await watch.next_message()
                if message["type"] == "websocket.disconnect":
                    return
                self.exchange = take_exchange(message)
                self.service.num_in_hand += 1
                try:
                    is_answered = await self._reply(watch.run(self._answer(message)))
                finally:
                    self.service.num_in_hand -= 1
                    self.exchange.close()
                goes_on = is_answered or self.survives_errors
            await self.send({"type": "websocket.close", "code": 1011, "reason": _CLOSE_REASON})
        except CallerGoneError:
            return
        finally:
            self.end_episode()

    async def _answer(self, message: Message) -> bytes | None:
        arrived_s = time.monotonic()
        if message.get("bytes") is None:
            raise MalformedMessageError(self.body_name, "send binary frames, got text")
        return await self.answer(message.pop("bytes"), arrived_s)  # no longer here than needed

    async def _reply(self, answering: Awaitable[bytes | None]) -> bool:
        """Send an answer, or say why there is none; return whether there was one."""
        try:
            answer = await answering
        except CallerGoneError:
            raise
        except Exception as error:  # noqa: BLE001  the robot gets the error
            await self.send_error(describe(error, self.connection))
            return False
        if answer is not None:
            await self.send({"type": "websocket.send", "bytes": answer})
        return True

    async def send(self, message: Message) -> None:
        """Send a message, or raise `CallerGoneError`."""
        try:
            await self._send(message)
        except OSError as error:
            raise CallerGoneError("the caller left while we sent") from error


class _Stream(RobotSocket):
    """Our own protocol: the messages of `POST /v1/act`."""

    body_name = "body"

    async def answer(self, data: bytes, arrived_s: float) -> bytes:
        await self.service.admit(self.caller)
        threads, context = self.service.threads, self.read_context()
        wire_format = WireFormat.MSGPACK
        message = await decode_frame(threads, context, wire_format.value, data)
        del data
        return await _answered(self.service, message, self.connection, arrived_s, wire_format)

    async def send_error(self, problem: Problem) -> None:
        await self.send({"type": "websocket.send", "text": encode_problem(problem).decode()})
