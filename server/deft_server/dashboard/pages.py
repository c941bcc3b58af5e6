"""`/dashboard`: its pages, and the WebSocket that feeds them.

The pages themselves hold nothing secret and are open; the feed asks for an administrator's key
where the server has keys. A browser cannot put a key into a WebSocket's headers, so the key is the
first message.
"""

import asyncio
import contextlib
import json
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from deft_server.dashboard.feed import (
    PUSH_S,
    Feed,
    TooManyViewersError,
    Viewer,
)
from deft_server.errors import AccessError, ForbiddenError
from deft_server.serving.service import Service

WRONG_KEY = 4401
TOO_MANY = 4429
_HELLO_S = 10.0
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def build_page_routes(service: Service) -> list[BaseRoute]:
    """Return the routes around a service."""
    feed = Feed(service)
    static = _load_static()

    async def page(request: Request) -> Response:
        return static["index.html"]

    async def explorer(request: Request) -> Response:
        return static["explorer.html"]

    async def asset(request: Request) -> Response:
        found = static.get(request.path_params["name"])
        return found if found is not None else RedirectResponse("/dashboard")

    async def serve_feed(websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            hello = await asyncio.wait_for(_receive(websocket), _HELLO_S)
            _check_key(service, websocket, hello.get("key"))
            viewer = feed.enter()
        except AccessError as error:
            await websocket.close(WRONG_KEY, str(error)[:120])
        except TooManyViewersError as error:
            await websocket.close(TOO_MANY, str(error))
        except (WebSocketDisconnect, asyncio.TimeoutError):
            return
        else:
            viewer.watch(_session_of(hello))
            try:
                await _push(websocket, viewer)
            finally:
                feed.leave()

    return [
        Route("/dashboard", page),
        Route("/dashboard/explorer", explorer),
        Route("/dashboard/static/{name}", asset),
        WebSocketRoute("/dashboard/feed", serve_feed),
    ]


async def _push(websocket: WebSocket, viewer: Viewer) -> None:
    """Send news until the page is closed."""
    commands = asyncio.create_task(_follow_commands(websocket, viewer))
    try:
        while not commands.done():
            news = await viewer.update()
            if news is not None:
                await websocket.send_text(json.dumps(news, allow_nan=False))
            await asyncio.wait((commands,), timeout=PUSH_S)
    except WebSocketDisconnect:
        pass
    finally:
        commands.cancel()
        with contextlib.suppress(asyncio.CancelledError, WebSocketDisconnect):
            await commands


async def _follow_commands(websocket: WebSocket, viewer: Viewer) -> None:
    while True:
        viewer.watch(_session_of(await _receive(websocket)))


async def _receive(websocket: WebSocket) -> dict[str, object]:
    """Return what the page says; what cannot be read says nothing."""
    try:
        value = json.loads(await websocket.receive_text())
    except (ValueError, KeyError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _session_of(message: dict[str, object]) -> str | None:
    key = message.get("watch")
    return key if isinstance(key, str) else None


def _check_key(service: Service, websocket: WebSocket, key: object) -> None:
    access = service.access
    if not access.needs_key:
        return
    address = websocket.client.host if websocket.client else ""
    caller = access.identify(f"Bearer {key}" if isinstance(key, str) and key else "", address)
    if not caller.is_admin:
        raise ForbiddenError("the dashboard needs a key marked `admin = true`")


def _load_static() -> dict[str, Response]:
    """Read every file of the pages once: they are small and do not change."""
    static = {}
    for file in files("deft_server.dashboard").joinpath("static").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in _TYPES:
            static[file.name] = Response(
                file.read_bytes(), media_type=_TYPES[suffix], headers=_HEADERS
            )
    return static
