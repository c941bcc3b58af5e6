"""What a WebSocket client sends, read ahead far enough to notice that it has left."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

Result = TypeVar("Result")


class Inbox:
    """The messages of one connection, in order."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._ahead: asyncio.Task[Message] | None = None

    async def next(self) -> Message:
        """Return the next message; raise `WebSocketDisconnect` when there will be none."""
        ahead, self._ahead = self._ahead, None
        message = await (ahead or self._websocket.receive())
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1005))
        return message

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do some work, but cancel it as soon as the client is gone: nobody wants its result."""
        task = asyncio.create_task(work)
        if self._ahead is None:
            self._ahead = asyncio.create_task(self._websocket.receive())
        try:
            await asyncio.wait((task, self._ahead), return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self._ahead.result()["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(1005)
            return await task
        finally:
            task.cancel()

    async def close(self) -> None:
        """Stop reading."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
