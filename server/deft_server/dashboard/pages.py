"""`/dashboard` and `/docs`: the pages, and the WebSocket that feeds them.

The pages themselves hold nothing secret and are open; the feed asks for an administrator's key
where the server has keys. A browser cannot put a key into a WebSocket's headers, so the key is the
first message. A page is sent what is new at most ten times a second; pictures are made once for
all.
"""

import asyncio
import base64
import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from io import BytesIO

from PIL import Image as pillow  # noqa: N813
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from deft_client.types import DecodeTrace, Image
from deft_server.dashboard.history import History, SessionHistory
from deft_server.errors import AccessError, ForbiddenError
from deft_server.http.bounds import SMALL_BODY_BYTES
from deft_server.serving.access import Caller
from deft_server.serving.events import Event
from deft_server.serving.service import Service

MAX_VIEWERS = 16
PUSH_S = 0.1
_OVERVIEW_S = 0.5
_THUMBNAIL_S = 2.0
_QUIET_S = 3.0  # a session that has sent nothing for so long makes room for one that does
_FRAME_SIDE = 384
_THUMBNAIL_SIDE = 64

Json = dict[str, object]

WRONG_KEY = 4401
TOO_MANY = 4429
_HELLO_S = 10.0
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".png": "image/png"}
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def build_page_routes(service: Service) -> list[BaseRoute]:
    """Return the routes of the dashboard around a service."""
    feed = Feed(service)
    static = _load_static()

    async def page(request: Request) -> Response:
        return static["index.html"]

    async def explorer(request: Request) -> Response:
        return static["explorer.html"]

    async def serve_feed(websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            await _serve_feed(websocket, service, feed)
        except AccessError as error:  # from the start, or because its key was taken out of the file
            await websocket.close(WRONG_KEY, str(error)[:120])
        except TooManyViewersError as error:
            await websocket.close(TOO_MANY, str(error))
        except (WebSocketDisconnect, asyncio.TimeoutError):
            return

    return [
        Route("/dashboard", page),
        Route("/dashboard/", page),
        Route("/dashboard/explorer", explorer),
        WebSocketRoute("/dashboard/feed", serve_feed),
    ]


def build_document_routes(start: str) -> list[BaseRoute]:
    """Return the routes of `/docs` and of what all pages are made of; `/` leads to `start`."""
    static = _load_static()

    async def docs(request: Request) -> Response:
        return static["docs.html"]

    async def root(request: Request) -> Response:
        return RedirectResponse(start)

    async def asset(request: Request) -> Response:
        found = static.get(request.path_params["name"])
        return found if found is not None else RedirectResponse("/")

    return [
        Route("/", root),
        Route("/docs", docs),
        Route("/dashboard/static/{name}", asset),
    ]


async def _serve_feed(websocket: WebSocket, service: Service, feed: "Feed") -> None:
    hello = await asyncio.wait_for(_receive(websocket), _HELLO_S)
    caller = _identify(service, websocket, hello.get("key"))
    viewer = feed.enter()
    viewer.watch(_session_of(hello))
    try:
        await _push(websocket, viewer, partial(service.access.require_known, caller))
    finally:
        feed.leave()


async def _push(
    websocket: WebSocket, viewer: "Viewer", require_known: Callable[[], Caller]
) -> None:
    """Send news until the page is closed; raise `MissingKeyError` once its key is gone."""
    commands = asyncio.create_task(_follow_commands(websocket, viewer))
    try:
        while not commands.done():
            require_known()
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


async def _follow_commands(websocket: WebSocket, viewer: "Viewer") -> None:
    while True:
        viewer.watch(_session_of(await _receive(websocket)))


async def _receive(websocket: WebSocket) -> dict[str, object]:
    """Return what the page says; what cannot be read, or is no mere name, says nothing."""
    try:
        said = await websocket.receive_text()
        value = json.loads(said) if len(said) <= SMALL_BODY_BYTES else {}
    except (ValueError, KeyError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _session_of(message: dict[str, object]) -> str | None:
    key = message.get("watch")
    return key if isinstance(key, str) else None


def _identify(service: Service, websocket: WebSocket, key: object) -> Caller:
    access = service.access
    if not access.needs_key:
        return Caller()
    address = websocket.client.host if websocket.client else ""
    caller = access.identify(f"Bearer {key}" if isinstance(key, str) and key else "", address)
    if not caller.is_admin:
        raise ForbiddenError("the dashboard needs a key marked `admin = true`")
    return caller


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


class TooManyViewersError(Exception):
    """As many pages as the server feeds are open already."""


class Feed:
    """The history, listening only while there are viewers, and pictures shared between them."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self.service = service
        self.history = History()
        self._clock = clock
        self._num_viewers = 0
        self._stop_listening: Callable[[], None] = lambda: None
        self._frames: dict[str, _Picture] = {}
        self._thumbnails: dict[str, _Picture] = {}

    def enter(self) -> "Viewer":
        """Add a viewer; the first one starts the listening."""
        if self._num_viewers >= MAX_VIEWERS:
            raise TooManyViewersError(f"{MAX_VIEWERS} dashboards are open already; close one")
        if self._num_viewers == 0:
            self._stop_listening = self.service.events.listen(self._note)
        self._num_viewers += 1
        return Viewer(self)

    def leave(self) -> None:
        """Remove a viewer; with the last one everything is forgotten."""
        self._num_viewers -= 1
        if self._num_viewers == 0:
            self._stop_listening()
            self.history.clear()
            self._frames.clear()
            self._thumbnails.clear()

    def now_s(self) -> float:
        """Return the time on the clock that never jumps."""
        return self._clock()

    async def frame(self, session: SessionHistory) -> str:
        """Return the session's last frame as a data URL."""
        return await _shared(self._frames, session, _FRAME_SIDE, 80)

    async def thumbnail(self, session: SessionHistory, now_s: float) -> str:
        """Return a small picture of the session that may be a little old."""
        known = self._thumbnails.get(session.key)
        if known is not None and now_s - known.made_s < _THUMBNAIL_S:
            return known.url
        url = await _shared(self._thumbnails, session, _THUMBNAIL_SIDE, 60)
        if session.key in self._thumbnails:
            self._thumbnails[session.key].made_s = now_s
        return url

    def _note(self, event: Event) -> None:
        self.history.note(event, self._clock())


@dataclass(eq=False)
class _Picture:
    source: Image
    url: str
    made_s: float = 0.0


class Viewer:
    """One open page: which session it watches and what it was sent already."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._watched: str | None = None
        self._is_chosen = False  # by whoever looks; otherwise the page follows who is alive
        self._sent_version = -1
        self._sent_number = 0
        self._sent_image: Image | None = None
        self._sent_trace: DecodeTrace | None = None
        self._overview_s = -math.inf

    def watch(self, key: str | None) -> None:
        """Look at another session, from its beginning; None looks at whoever sends frames."""
        self._is_chosen = key is not None
        self._turn_to(key)

    def _turn_to(self, key: str | None) -> None:
        if key != self._watched:
            self._watched = key
            self._sent_number = 0
            self._sent_image = None
            self._sent_trace = None
            self._sent_version = -1

    async def update(self) -> Json | None:
        """Return what is new, or None."""
        feed = self._feed
        now_s = feed.now_s()
        is_due = now_s - self._overview_s >= _OVERVIEW_S
        if feed.history.version == self._sent_version and not is_due:
            return None
        self._sent_version = feed.history.version
        told: Json = {}
        if is_due:
            self._overview_s = now_s
            told["overview"] = self._overview(now_s)
            told["sessions"] = [
                await self._summary(one, now_s) for one in list(feed.history.sessions.values())
            ]
        session = self._session()
        if session is not None:
            told["watched"] = await self._watched_news(session)
        return told

    def _session(self) -> SessionHistory | None:
        """Return the watched session; where none was chosen, one that is alive."""
        sessions = self._feed.history.sessions
        watched = sessions.get(self._watched or "")
        if self._is_chosen or not sessions:
            return watched
        if watched is None or self._feed.now_s() - watched.seen_s > _QUIET_S:
            watched = max(sessions.values(), key=lambda one: one.seen_s)
            self._turn_to(watched.key)
        return watched

    def _overview(self, now_s: float) -> Json:
        service = self._feed.service
        figures = self._feed.history.overview(now_s)
        return {
            **{name: _finite(value) for name, value in figures.items()},
            "phase": service.readiness.phase.value,
            "phase_text": service.readiness.sentence,
            "waiting": service.scheduler.num_waiting,
            "sessions": len(service.sessions),
        }

    async def _summary(self, session: SessionHistory, now_s: float) -> Json:
        last = session.points[-1] if session.points else None
        return {
            "key": session.key,
            "name": session.session_id,
            "caller": session.caller,
            "instruction": session.instruction,
            "answers": session.num_answers,
            "errors": session.num_errors,
            "rate_hz": session.rate_hz(now_s),
            "last_ms": last.total_ms if last else None,
            "idle_s": now_s - session.seen_s,
            "thumbnail": await self._feed.thumbnail(session, now_s),
        }

    async def _watched_news(self, session: SessionHistory) -> Json:
        news: Json = {"key": session.key, "instruction": session.instruction}
        points = [one for one in session.points if one.number > self._sent_number]
        if points:
            news["restart"] = self._sent_number == 0
            news["points"] = [vars(one) for one in points]
            self._sent_number = points[-1].number
        if session.image is not self._sent_image:
            self._sent_image = session.image
            news["frame"] = await self._feed.frame(session)
        if session.trace is not self._sent_trace and session.trace is not None:
            self._sent_trace = session.trace
            news["trace"] = trace_json(session.trace)
        return news


def trace_json(trace: DecodeTrace) -> Json:
    """Return a decode trace as the page draws it."""
    return {**vars(trace), "passes": [vars(one) for one in trace.passes]}


async def _shared(
    pictures: dict[str, _Picture], session: SessionHistory, side: int, quality: int
) -> str:
    """Return a picture of the session's frame, compressed once for all viewers."""
    image = session.image
    if image is None:
        return ""
    known = pictures.get(session.key)
    if known is None or known.source is not image:
        url = await asyncio.to_thread(_data_url, image, side, quality)
        known = pictures[session.key] = _Picture(image, url)
    return known.url


def _data_url(image: Image, side: int, quality: int) -> str:
    picture = pillow.fromarray(image)
    picture.thumbnail((side, side))
    buffer = BytesIO()
    picture.save(buffer, "JPEG", quality=quality)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else value
