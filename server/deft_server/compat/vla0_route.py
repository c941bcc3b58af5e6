"""`POST /predict_base64` and `/predict_base64_stream` as VLA-0's server answers its clients.

Rows are in the order of the plain endpoint. Of the stream each leaves once its numbers are
committed. All are rows of one answer: a stream whose answer fails after its first row, or is begun
anew and turns out another, ends with a line that says why, and the connection breaks off. VLA-0's
clients skip lines without a row, but raise where a body has no end. They know no sessions, so that
a caller's address and key stand for one, as long as it has one frame in hand: several robots may
share an address. Other errors are problems with a status, as everywhere.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deft_core.peers.openvla import NotAnObjectError, decode_json
from deft_core.types import ActionChunk
from deft_core.wire.limits import ReadContext
from deft_core.wire.messages import ActMessage
from deft_policies.base import OnActions
from deft_policies.errors import PolicyError
from deft_server.compat.profiles import staying
from deft_server.compat.vla0 import (
    encode_actions,
    encode_failure,
    encode_rows,
    encode_time,
    vla0_request,
)
from deft_server.errors import PolicyFailedError, ServerError
from deft_server.http.frame_bodies import read_body
from deft_server.http.gate import caller_of, exchange_of
from deft_server.http.problems import describe
from deft_server.http.routes import PlainRoute
from deft_server.http.watches import CallerWatch
from deft_server.serving.service import Service
from deft_server.serving.sessions import flow_of

PATH = "/predict_base64"


def build_vla0_routes(service: Service) -> list[PlainRoute]:
    """Return the two routes around a service."""
    in_hand: set[str] = set()  # the flows of sessions whose frame is being answered

    async def predict(request: Request) -> Response:
        """Answer a client of VLA-0; see docs/protocols.md."""
        body = await read_body(request.receive)
        work = _answered(service, in_hand, request, body, time.monotonic())
        chunk = await CallerWatch(request.receive).run(work)
        return Response(encode_actions(chunk), media_type="application/json")

    async def predict_stream(request: Request) -> Response:
        """Answer a client of VLA-0 row by row; see docs/protocols.md."""
        body = await read_body(request.receive)
        arrived_s = time.monotonic()
        answer = partial(_answered, service, in_hand, request, body, arrived_s)
        return _RowStream(answer, arrived_s)

    return [
        PlainRoute(PATH, predict, methods=["POST"]),
        PlainRoute(f"{PATH}_stream", predict_stream, methods=["POST"]),
    ]


async def _answered(
    service: Service,
    in_hand: set[str],
    request: Request,
    body: bytes,
    arrived_s: float,
    on_actions: OnActions | None = None,
) -> ActionChunk:
    caller = staying(caller_of(request.scope))
    await service.admit(caller)
    hold = exchange_of(request.scope).hold
    context = ReadContext(service.settings.wire_limits, hold=hold)
    message = await service.threads.run(partial(_decode, body, context))
    session_id = f"vla0-{caller.address}"
    flow = flow_of(caller.name, session_id)
    if flow in in_hand:  # another robot's, maybe; in a session the newer frame would replace it
        return await service.act(
            message.observation, message.options, caller, arrived_s, on_actions, is_peers=True
        )
    in_hand.add(flow)
    try:
        options = replace(message.options, session_id=session_id)
        return await service.act(
            message.observation, options, caller, arrived_s, on_actions, is_peers=True
        )
    finally:
        in_hand.remove(flow)


class _AnotherAnswerError(PolicyFailedError):
    """Rows of one answer have left, and the rows that are there now are another's."""

    def __init__(self) -> None:
        super().__init__(
            "the answer was begun anew after a failure, and differs from the rows already sent; "
            "send the frame again"
        )


class _RowStream(Response):
    """Rows as they are committed."""

    def __init__(
        self, answer: Callable[[OnActions], Awaitable[ActionChunk]], arrived_s: float
    ) -> None:
        super().__init__(media_type="application/x-ndjson")
        del self.headers["content-length"]
        self._answer, self._arrived_s = answer, arrived_s
        self._sent: Sequence[NDArray[np.float64]] = ()  # rows that have left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send rows until the answer has ended, or raise if it fails before the first."""
        await CallerWatch(receive).run(self._send_all(Request(scope), send))

    async def _send_all(self, request: Request, send: Send) -> None:
        begun: asyncio.Queue[NDArray[np.float64] | None] = asyncio.Queue()
        answering = asyncio.ensure_future(self._answer(begun.put_nowait))
        answering.add_done_callback(lambda _: begun.put_nowait(None))
        try:
            while (actions := await begun.get()) is not None:
                await self._send_rows(actions, send)
            actions = (await answering).actions
            await self._send_rows(actions, send)
            if len(actions) < len(self._sent):
                raise _AnotherAnswerError
        except (PolicyError, ServerError) as error:
            if not len(self._sent):
                raise
            line = encode_failure(describe(error, request))
            await send({"type": "http.response.body", "body": line, "more_body": True})
            return  # without an end, so that the connection is closed
        finally:
            answering.cancel()
        line = encode_time(time.monotonic() - self._arrived_s)
        await send({"type": "http.response.body", "body": line})

    async def _send_rows(self, actions: NDArray[np.float64], send: Send) -> None:
        """Send those that were not sent yet."""
        num_sent = len(self._sent)
        # After a round that failed an answer may be begun anew, and may turn out another.
        if not all(map(np.array_equal, actions, self._sent)):
            raise _AnotherAnswerError
        if len(actions) <= num_sent:
            return
        if not num_sent:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
        lines = encode_rows(actions, num_sent)
        await send({"type": "http.response.body", "body": lines, "more_body": True})
        self._sent = list(actions)


def _decode(body: bytes, context: ReadContext) -> ActMessage:
    fields = decode_json(body, context.limits)
    if not isinstance(fields, dict):
        raise NotAnObjectError(fields)
    return vla0_request(fields, context)
