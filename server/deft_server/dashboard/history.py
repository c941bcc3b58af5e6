"""What the dashboard remembers: recent actions of every session, and of the server as a whole.

Whoever opens it after an incident sees the quarter of an hour before. Traces and texts are kept
while somebody looks. Memory is bounded: 64 sessions, 240 actions and 3 small pictures each. Knows
nothing of sockets or pages.
"""

import math
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from deft_core.types import ActionChunk, DecodeTrace, Image, Observation
from deft_policies.errors import NoActionError
from deft_server.errors import DeadlineError
from deft_server.serving.access import Caller
from deft_server.serving.events import Event, FinishedAction, SessionEnded

MAX_POINTS = 240
MAX_SESSIONS = 64
MAX_CAMERAS = 3  # whose last pictures are kept of a session, the main one among them
PICTURE_SIDE = 384  # at most
UNWATCHED_SIDE = 256  # the same while nobody looks
UNWATCHED_PICTURE_EVERY_S = 1.0  # then a copy of every frame would cost each robot its time
WINDOW_S = 30.0
KEPT_S = 900.0  # what is older is forgotten
TICK_S = 5.0  # of the timeline
_MAX_WINDOW = 10_000
STAGES = (
    "queue_ms", "wire_ms", "prepare_ms", "vision_ms", "prefill_ms", "draft_ms", "verify_ms",
    "judge_ms", "commit_ms", "finish_ms",
)  # fmt: skip
UNNAMED = "(no session)"
_MADE_UP = re.compile("[0-9a-f-]{24,}")  # as clients do for those who name none


@dataclass(frozen=True)
class Point:
    """One answered frame as the plots need it."""

    number: int
    at_s: float
    action: tuple[float, ...]
    stages: dict[str, float]
    total_ms: float
    accepted: tuple[int, ...]  # drafted tokens kept, of each pass that checked drafts
    passes: int


@dataclass(eq=False)
class SessionHistory:
    """The recent past of one session."""

    key: str
    caller: str
    session_id: str
    points: deque[Point] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    pictures: dict[str, Image] = field(default_factory=dict)  # camera -> last frame, reduced
    pictures_s: float = -math.inf  # when they were made
    instruction: str = ""
    trace: DecodeTrace | None = None
    thought: "Thought | None" = None
    num_answers: int = 0
    num_errors: int = 0
    num_late: int = 0  # of the errors
    seen_s: float = 0.0
    ended_s: float | None = None  # when it was reset, or forgotten by the server
    note: str = ""  # on its last request

    @property
    def name(self) -> str:
        """What people call it: made-up ids shortened, with the key that it came with."""
        short = self.session_id
        if _MADE_UP.fullmatch(short):
            short = f"session {short[:4]}"
        return short if self.caller == Caller().name else f"{self.caller} · {short}"

    def rate_hz(self, now_s: float) -> float:
        """Return the answers per second over the last seconds."""
        recent = [one.at_s for one in self.points if now_s - one.at_s <= 5.0]
        return (len(recent) - 1) / (recent[-1] - recent[0]) if len(recent) > 2 else 0.0


@dataclass(frozen=True, eq=False)
class Thought:
    """What a policy wrote before it acted, or in place of it."""

    text: str
    before: str | None  # what it wrote of the frame before
    trace: DecodeTrace | None
    error: str = ""  # why there is no action in it
    actions: NDArray[np.float64] | None = None  # [step, action_dim]


@dataclass(eq=False)
class Tick:
    """A few seconds of the server's past."""

    start_s: float
    answers: int = 0
    errors: int = 0
    slowest_ms: float = 0.0


@dataclass(frozen=True)
class _Finish:
    """One frame in the window: its latency, or NaN for an error, and the sums of its passes."""

    at_s: float
    total_ms: float
    counts: "PassCounts | None"  # None without a trace


@dataclass(frozen=True)
class PassCounts:
    """Counts over target passes, addable. Acceptance, draft length and cost follow from them."""

    actions: int = 0
    passes: int = 0
    drafting_passes: int = 0
    tries: int = 0  # drafted tokens that were judged, along the path that went furthest
    kept: int = 0
    levels: int = 0  # depth of the draft trees, summed
    draft_ms: float = 0.0
    decode_passes: int = 0
    decode_pass_ms: float = 0.0
    tokens: int = 0
    relaxed: int = 0

    def __add__(self, other: "PassCounts") -> "PassCounts":
        mine, theirs = vars(self), vars(other)
        return PassCounts(**{name: mine[name] + theirs[name] for name in mine})

    def __sub__(self, other: "PassCounts") -> "PassCounts":
        mine, theirs = vars(self), vars(other)
        return PassCounts(**{name: mine[name] - theirs[name] for name in mine})

    @property
    def acceptance(self) -> float:
        """Share of judged drafted tokens that were kept (alpha), or NaN."""
        return _ratio(self.kept, self.tries)

    @property
    def draft_length(self) -> float:
        """Mean depth of the draft trees (K), or NaN."""
        return _ratio(self.levels, self.drafting_passes)

    @property
    def draft_cost(self) -> float:
        """Time to draft one level, in passes of the target that decode (c), or NaN."""
        pass_ms = _ratio(self.decode_pass_ms, self.decode_passes)
        return _ratio(_ratio(self.draft_ms, self.levels), pass_ms)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def counts_of(trace: DecodeTrace) -> PassCounts:
    """Count what one decode trace says about speculation."""
    passes, kept = trace.passes, trace.accepted_lengths
    levels = [_depth(one.parents) for one in passes]
    decoding = [one for one in passes if not one.is_prefill]
    return PassCounts(
        actions=1,
        passes=len(passes),
        drafting_passes=sum(level > 0 for level in levels),
        tries=sum(min(length + 1, level) for length, level in zip(kept, levels, strict=True)),
        kept=sum(kept),
        levels=sum(levels),
        draft_ms=sum(one.draft_ms for one in passes),
        decode_passes=len(decoding),
        decode_pass_ms=sum(one.pass_ms for one in decoding),
        tokens=len(trace.tokens),
        relaxed=sum(a != b for a, b in zip(trace.tokens, trace.predicted, strict=True)),
    )


def _depth(parents: Iterable[int]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


class History:
    """All sessions and the window over the whole server."""

    def __init__(self) -> None:
        self.version = 0  # grows with every event: tells a viewer whether there is news
        self.sessions: dict[str, SessionHistory] = {}  # in the order in which they came
        self.timeline: deque[Tick] = deque(maxlen=int(KEPT_S / TICK_S))
        self._window: deque[_Finish] = deque()
        self._counts = PassCounts()  # summed over the window

    def note(self, event: Event, now_s: float, is_watched: bool = True) -> None:
        """Remember an event; of what nobody looks at, less."""
        self.version += 1
        if isinstance(event, SessionEnded):
            ended = self.sessions.get(_key(event))
            if ended is not None:
                ended.ended_s = now_s
            return
        session = self._session(event, now_s)
        session.seen_s, session.ended_s = now_s, None
        if is_watched or now_s - session.pictures_s >= UNWATCHED_PICTURE_EVERY_S:
            side = PICTURE_SIDE if is_watched else UNWATCHED_SIDE
            session.pictures, session.pictures_s = reduced(event.observation, side), now_s
        tick = self._tick(now_s)
        if event.chunk is None:
            session.num_errors += 1
            session.num_late += isinstance(event.error, DeadlineError)
            if isinstance(event.error, NoActionError):
                _see(session, event, event.error.reasoning)
            tick.errors += 1
            self._enter(_Finish(now_s, math.nan, None))
            return
        session.num_answers += 1
        session.note = "; ".join(event.chunk.notes)
        _see(session, event, event.chunk.reasoning)
        trace = event.chunk.trace if is_watched else None
        if trace is not None:
            session.trace = trace
        point = _point(event.chunk, trace, session.num_answers, now_s)
        session.points.append(point)
        tick.answers += 1
        tick.slowest_ms = max(tick.slowest_ms, point.total_ms)
        counts = None if trace is None else counts_of(trace)
        self._enter(_Finish(now_s, point.total_ms, counts))

    def forget_old(self, now_s: float) -> None:
        """Forget sessions without a frame for long, and what is before the timeline's span."""
        for key, session in list(self.sessions.items()):
            if now_s - session.seen_s > KEPT_S:
                del self.sessions[key]
        while self.timeline and now_s - self.timeline[0].start_s > KEPT_S:
            self.timeline.popleft()

    def _tick(self, now_s: float) -> Tick:
        if not self.timeline or now_s - self.timeline[-1].start_s >= TICK_S:
            self.timeline.append(Tick(now_s - now_s % TICK_S))
        return self.timeline[-1]

    def overview(self, now_s: float) -> dict[str, float]:
        """Return the figures of the whole server over the window; NaN where nothing is known."""
        while self._window and now_s - self._window[0].at_s > WINDOW_S:
            self._drop_oldest()
        latencies = sorted(one.total_ms for one in self._window if not math.isnan(one.total_ms))
        span_s = now_s - self._window[0].at_s if self._window else 0.0
        counts = self._counts
        return {
            "rate_hz": len(latencies) / span_s if span_s > 0.5 else math.nan,
            "p50_ms": _quantile(latencies, 0.50),
            "p95_ms": _quantile(latencies, 0.95),
            "p99_ms": _quantile(latencies, 0.99),
            "errors": float(len(self._window) - len(latencies)),
            "actions": float(counts.actions),
            "passes_per_action": _ratio(counts.passes, counts.actions),
            "tokens_per_pass": _ratio(counts.tokens, counts.passes),
            "relaxed_share": _ratio(counts.relaxed, counts.tokens),
            "acceptance": counts.acceptance,
            "draft_length": counts.draft_length,
            "draft_cost": counts.draft_cost,
        }

    def _enter(self, finish: _Finish) -> None:
        self._window.append(finish)
        if finish.counts is not None:
            self._counts += finish.counts
        if len(self._window) > _MAX_WINDOW:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        counts = self._window.popleft().counts
        if counts is not None:
            self._counts -= counts
        if not self._window:
            self._counts = PassCounts()  # and with it what rounding has left

    def _session(self, event: FinishedAction, now_s: float) -> SessionHistory:
        key = _key(event)
        session = self.sessions.get(key)
        if session is None:
            self.forget_old(now_s)
            if len(self.sessions) >= MAX_SESSIONS:
                del self.sessions[min(self.sessions, key=lambda one: self.sessions[one].seen_s)]
            session = self.sessions[key] = SessionHistory(
                key, event.caller, event.session_id or UNNAMED
            )
        return session


def _see(session: SessionHistory, event: FinishedAction, text: str | None) -> None:
    """Keep what was asked, and what was written about it."""
    session.instruction = event.observation.instruction
    before = None if session.thought is None else session.thought.text
    trace = None if event.chunk is None else event.chunk.trace
    error = "" if event.error is None else str(event.error)
    actions = None if event.chunk is None else event.chunk.actions
    session.thought = None if text is None else Thought(text, before, trace, error, actions)


def _key(event: Event) -> str:
    return f"{event.caller}/{event.session_id or UNNAMED}"


def reduced(observation: Observation, side: int = PICTURE_SIDE) -> dict[str, Image]:
    """Return small copies of the first cameras' pictures: every n-th pixel, which is quick."""
    views = {"": observation.image, **observation.cameras}
    pictures = {}
    for name, image in islice(views.items(), MAX_CAMERAS):
        step = math.ceil(max(image.shape[:2]) / side)
        pictures[name] = image[::step, ::step].copy()
    return pictures


def _point(chunk: ActionChunk, trace: DecodeTrace | None, number: int, now_s: float) -> Point:
    timings = chunk.timings
    stages = {name.removesuffix("_ms"): getattr(timings, name) for name in STAGES}
    return Point(
        number=number,
        at_s=now_s,
        action=tuple(chunk.actions[0].tolist()),
        stages={name: spent for name, spent in stages.items() if spent > 0},
        total_ms=timings.total_ms,
        accepted=tuple(one.accepted_length for one in trace.checked_passes) if trace else (),
        passes=trace.num_passes if trace else 0,
    )


def _quantile(ordered: list[float], share: float) -> float:
    """Return the nearest-rank quantile of sorted values, or NaN."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
