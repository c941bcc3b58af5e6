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
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from itertools import groupby
from operator import itemgetter
from weakref import WeakKeyDictionary

import msgspec
from PIL import Image as pillow
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from deft_core.reasoning import ACTION, Part, parse_reasoning, part_costs
from deft_core.types import DecodeTrace, Image
from deft_core.wire.codec import sent_trace
from deft_server.dashboard.history import (
    PICTURE_SIDE,
    TICK_S,
    History,
    SessionHistory,
    Thought,
)
from deft_server.errors import AccessError, ForbiddenError, OverloadedError
from deft_server.http.gate import SMALL_BODY_BYTES
from deft_server.serving.access import Access, Caller
from deft_server.serving.events import Event
from deft_server.serving.service import Service

MAX_VIEWERS = 16
PUSH_S = 0.1
_OVERVIEW_S = 0.5
_THUMBNAIL_S = 2.0
_QUIET_S = 3.0  # a session that has sent nothing for so long makes room for one that does
_THUMBNAIL_SIDE = 64
_NUMBERS = re.compile("[0-9 ]+")

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
    """Return the routes of the pages; `/` leads to the dashboard, or to `/docs` without one."""
    static = _load_static()
    pages = {"/docs": "docs.html"}
    if service.settings.dashboard:
        pages |= {"/dashboard": "index.html", "/dashboard/": "index.html"}

    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/dashboard" if service.settings.dashboard else "/docs")
        return JSONResponse({"status": "ok"})  # VLA-0's clients ask so

    async def asset(request: Request) -> Response:
        return static.get(request.path_params["name"]) or Response(status_code=404)

    routes: list[BaseRoute] = [
        Route("/", root),
        Route("/dashboard/static/{name}", asset),
        *(Route(path, static[name], methods=["GET"]) for path, name in pages.items()),
    ]
    if not service.settings.dashboard:
        return routes
    feed = Feed(service)

    async def serve_feed(websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            await _serve_feed(websocket, service, feed)
        except AccessError as error:  # from the start, or because its key was taken out of the file
            await websocket.close(WRONG_KEY, str(error)[:120])
        except OverloadedError as error:
            await websocket.close(TOO_MANY, str(error))
        except (TimeoutError, WebSocketDisconnect):
            return

    return [*routes, WebSocketRoute("/dashboard/feed", serve_feed)]


async def _serve_feed(websocket: WebSocket, service: Service, feed: "Feed") -> None:
    """Send news until the page is closed; raise `MissingKeyError` once its key is gone."""
    hello = await asyncio.wait_for(_receive(websocket), _HELLO_S)
    caller = _identify(service.access, hello.get("key"))
    viewer = feed.enter()
    viewer.watch(_session_of(hello))
    commands = asyncio.create_task(_follow_commands(websocket, viewer))
    try:
        while not commands.done():
            service.access.require_known(caller)
            news = await viewer.update()
            if news is not None:
                await websocket.send_text(json.dumps(news, allow_nan=False))
            await asyncio.wait((commands,), timeout=PUSH_S)
    finally:
        feed.leave()
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


def _identify(access: Access, key: object) -> Caller:
    caller = access.identify(f"Bearer {key}" if isinstance(key, str) else "", "")
    if access.needs_key and not caller.is_admin:
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


class Feed:
    """The history, and what all viewers are sent alike. Without viewers no traces are asked for."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self.service = service
        self.now_s = clock
        self._making = asyncio.Lock()  # what one viewer makes, the others wait for
        self._overview: Json = {}
        self._overview_s = -math.inf
        self.history = History()
        self._timeline: list[list[float]] = []
        self._timeline_s = -math.inf
        self._frames: WeakKeyDictionary[SessionHistory, _Shown] = WeakKeyDictionary()
        self._thumbnails: WeakKeyDictionary[SessionHistory, _Shown] = WeakKeyDictionary()
        self._num_viewers = 0
        self._stop_listening = service.events.listen(self._note, wants_traces=False)

    def enter(self) -> "Viewer":
        """Add a viewer; the first one starts the listening."""
        if self._num_viewers >= MAX_VIEWERS:
            raise OverloadedError(f"{MAX_VIEWERS} dashboards are open already; close one", _QUIET_S)
        if self._num_viewers == 0:
            self._listen(wants_traces=True)
        self._num_viewers += 1
        return Viewer(self)

    def leave(self) -> None:
        """Remove a viewer."""
        self._num_viewers -= 1
        if self._num_viewers == 0:
            self._listen(wants_traces=False)

    async def overview(self) -> Json:
        """Return the figures and the list of sessions, made at most twice a second."""
        async with self._making:
            now_s = self.now_s()
            if now_s - self._overview_s >= _OVERVIEW_S:
                self._overview_s = now_s
                self.history.forget_old(now_s)
                sessions = list(self.history.sessions.values())
                summaries = [await self._summary(one, now_s) for one in sessions]
                self._overview = {"overview": self._figures(now_s), "sessions": summaries}
            return self._overview

    def timeline(self) -> list[list[float]]:
        """Return the server's last minutes: [seconds ago, answers, errors, slowest_ms] each.

        The same list until a few seconds have passed.
        """
        now_s = self.now_s()
        if now_s - self._timeline_s >= TICK_S:
            self._timeline_s = now_s
            self._timeline = [
                [now_s - one.start_s, one.answers, one.errors, one.slowest_ms]
                for one in self.history.timeline
            ]
        return self._timeline

    async def frames(self, session: SessionHistory) -> dict[str, str]:
        """Return the last picture of each of the session's cameras as a data URL."""
        async with self._making:
            return await self._shown(self._frames, session, PICTURE_SIDE, PUSH_S)

    async def _summary(self, session: SessionHistory, now_s: float) -> Json:
        last = session.points[-1] if session.points else None
        small = await self._shown(self._thumbnails, session, _THUMBNAIL_SIDE, _THUMBNAIL_S)
        return {
            "key": session.key,
            "name": session.name,
            "session_id": session.session_id,
            "caller": session.caller,
            "instruction": session.instruction,
            "answers": session.num_answers,
            "errors": session.num_errors,
            "late": session.num_late,
            "note": session.note,
            "ended_s": None if session.ended_s is None else now_s - session.ended_s,
            "rate_hz": session.rate_hz(now_s),
            "last_ms": last.total_ms if last else None,
            "idle_s": now_s - session.seen_s,
            "thumbnail": next(iter(small.values()), ""),
        }

    async def _shown(
        self, made: "WeakKeyDictionary[SessionHistory, _Shown]", session: SessionHistory,
        side: int, max_age_s: float,
    ) -> dict[str, str]:  # fmt: skip
        """Return a session's pictures, compressed once for all viewers; they may be a bit old."""
        known = made.get(session)
        now_s = self.now_s()
        if known is None or (
            known.source is not session.pictures and now_s - known.made_s >= max_age_s
        ):
            source = session.pictures
            urls = await asyncio.to_thread(_data_urls, source, side)
            known = made[session] = _Shown(source, urls, now_s)
        return known.urls

    def _figures(self, now_s: float) -> Json:
        service = self.service
        return {
            **{name: _finite(value) for name, value in self.history.overview(now_s).items()},
            "phase": service.readiness.phase.value,
            "phase_text": service.readiness.sentence,
            "waiting": service.scheduler.num_waiting,
            "sessions": len(service.sessions),
        }

    def _note(self, event: Event) -> None:
        self.history.note(event, self.now_s(), is_watched=self._num_viewers > 0)

    def _listen(self, wants_traces: bool) -> None:
        self._stop_listening()
        self._stop_listening = self.service.events.listen(self._note, wants_traces)


@dataclass(frozen=True)
class _Shown:
    source: dict[str, Image]
    urls: dict[str, str]  # camera -> data URL
    made_s: float


class Viewer:
    """One open page: which session it watches and what it was sent already."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._watched: str | None = None
        self._is_chosen = False  # by whoever looks; otherwise the page follows who is alive
        self._sent_version = -1
        self._sent_overview: Json = {}
        self._sent_timeline: list[list[float]] = []
        self._turn_to(None)

    def watch(self, key: str | None) -> None:
        """Look at another session, from its beginning; None looks at whoever sends frames."""
        self._is_chosen = key is not None
        if key != self._watched:
            self._turn_to(None)
            self._watched = key

    def _turn_to(self, session: SessionHistory | None) -> None:
        self._session = session
        self._watched = session.key if session else None
        self._sent_number = 0
        self._sent_frames: dict[str, str] = {}
        self._sent_trace: DecodeTrace | None = None
        self._sent_thought: Thought | None = None
        self._sent_version = -1

    async def update(self) -> Json | None:
        """Return what is new, or None."""
        feed = self._feed
        overview = await feed.overview()
        if feed.history.version == self._sent_version and overview is self._sent_overview:
            return None
        news = dict(overview) if overview is not self._sent_overview else {}
        self._sent_overview = overview
        timeline = feed.timeline()
        if timeline is not self._sent_timeline:
            news["timeline"] = self._sent_timeline = timeline
        self._follow()
        self._sent_version = feed.history.version
        if self._session is not None:
            news["watched"] = await self._watched_news(self._session)
        return news

    def _follow(self) -> None:
        """Find the watched session, which may have begun anew, or one that is alive."""
        sessions = self._feed.history.sessions
        watched = sessions.get(self._watched or "")
        is_quiet = watched is None or self._feed.now_s() - watched.seen_s > _QUIET_S
        if sessions and is_quiet and not self._is_chosen:
            watched = max(sessions.values(), key=lambda one: one.seen_s)
        if watched is not None and watched is not self._session:
            self._turn_to(watched)

    async def _watched_news(self, session: SessionHistory) -> Json:
        news: Json = {"key": session.key, "instruction": session.instruction}
        points = [one for one in session.points if one.number > self._sent_number]
        if points:
            news["restart"] = self._sent_number == 0
            news["points"] = [vars(one) for one in points]
            self._sent_number = points[-1].number
        frames = await self._feed.frames(session)
        if frames is not self._sent_frames:
            self._sent_frames = frames
            news["frames"] = frames
        if session.thought is not self._sent_thought:
            self._sent_thought = session.thought
            news["thought"] = None if session.thought is None else thought_fields(session.thought)
        # Of a text there are hundreds of nodes, and nobody could see a tree in them.
        is_drawn = session.trace is not self._sent_trace and session.thought is None
        if is_drawn and session.trace is not None:
            self._sent_trace = session.trace
            news["trace"] = msgspec.to_builtins(sent_trace(session.trace))
        return news


def thought_fields(thought: Thought) -> Json:
    """Return what a policy wrote as the page shows it: part by part, beside what stood there."""
    before = None if thought.before is None else parse_reasoning(thought.before).parts
    found, trace = parse_reasoning(thought.text), thought.trace
    costs = [] if trace is None else part_costs(trace, thought.text)
    shown = [vars(one) for one in costs if one.tokens]
    parts: list[Json] = [
        {"tag": one.tag, "text": one.text, "before": None if before is None else _said(before, one)}
        for one in found.parts
    ]
    for part, cost in zip(parts, shown, strict=False):
        if cost["tag"] == part["tag"]:
            part.update(cost)
    if parts and parts[-1]["tag"] == ACTION and not thought.error:
        parts[-1].update(text="", before=None)  # action tokens are no words
    return {
        "parts": parts,
        "rows": _number_rows(thought),
        "fast": _fast_fields(thought),
        "boxes": [vars(one) for one in found.boxes],
        "gripper": found.gripper,
        "passes": 0 if trace is None else trace.num_passes,
        "tokens": 0 if trace is None else len(trace.tokens),
        "error": thought.error or None,
    }


def _number_rows(thought: Thought) -> list[list[Json]] | None:
    """An answer that is numbers, a row for each action: runs of text that were drafted, or not.

    Its digits and spaces are a token each.
    """
    if not _NUMBERS.fullmatch(thought.text):
        return None
    passes = () if thought.trace is None else thought.trace.passes
    is_drafted = [kept for one in passes for kept in (*[True] * one.accepted_length, False)]
    words, rows, start = thought.text.split(" "), list[list[Json]](), 0
    length = len(words) if thought.actions is None else thought.actions.shape[1]
    for first in range(0, len(words), length):
        text = " ".join(words[first : first + length])
        marks = [*is_drafted[start:], *[False] * len(text)]
        runs = groupby(zip(text, marks, strict=False), itemgetter(1))
        rows.append([{"drafted": kept, "text": "".join(c for c, _ in run)} for kept, run in runs])
        start += len(text) + 1
    return rows


def _fast_fields(thought: Thought) -> Json | None:
    """An answer in FAST codes: its coefficients, which of them were drafted, and its actions."""
    if thought.trace is None or thought.trace.fast is None or thought.actions is None:
        return None
    return {**vars(thought.trace.fast), "actions": thought.actions.tolist()}


def _said(parts: Sequence[Part], like: Part) -> str:
    """What stood in the part of the same tag; nothing where there was none."""
    return next((one.text for one in parts if one.tag == like.tag), "")


def _data_urls(pictures: dict[str, Image], side: int) -> dict[str, str]:
    return {camera: _data_url(image, side) for camera, image in pictures.items()}


def _data_url(image: Image, side: int) -> str:
    picture = pillow.fromarray(image)
    picture.thumbnail((side, side))
    buffer = BytesIO()
    picture.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else value
