"""What every request passes before any route sees it: a request id, the caller, the body limits.

Plain ASGI, because this is on the way of every frame.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deft_server import request_ids
from deft_server.access import ANONYMOUS, Caller
from deft_server.errors import BodyTooLargeError
from deft_server.service import Service

CALLER = "deft.caller"


def caller_of(scope: Scope) -> Caller:
    """Return who sent this request, as the gate found out."""
    caller: Caller = scope[CALLER]
    return caller


class Gate:
    """The outermost layer of the app."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._max_bytes = service.settings.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = request_ids.given_or_new(headers.get(request_ids.HEADER))
        request_ids.current.set(request_id)
        scope[CALLER] = ANONYMOUS
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (request_ids.HEADER, request_id.encode("ascii")),
                ]
            await send(message)

        await self._app(scope, _limited(receive, self._max_bytes), send_with_id)


def _limited(receive: Receive, max_bytes: int) -> Receive:
    taken = 0

    async def receive_some() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > max_bytes:
            raise BodyTooLargeError(f"more than the {max_bytes} bytes that are taken")
        return message

    return receive_some
