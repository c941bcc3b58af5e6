"""Events for recording and the dashboard."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from deft_core.types import ActionChunk, ActOptions, Observation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class FinishedAction:
    """One frame and what became of it: an answer, or the error that its caller got."""

    caller: str
    session_id: str | None
    step: int  # answers of this session before this one
    observation: Observation
    options: ActOptions
    chunk: ActionChunk | None
    error: Exception | None = None


@dataclass(frozen=True)
class SessionEnded:
    """A session was reset or forgotten: the next frame under its id is another episode."""

    caller: str
    session_id: str


Event = FinishedAction | SessionEnded
Listen = Callable[[Event], None]


class EventBus:
    """Publishes every finished action to its listeners; costs nothing without any.

    Policies trace their answers, which takes time, only where a listener wants that.

    Recording and the dashboard listen. A listener runs on the event loop and must be quick; it may
    begin and stop to listen on any thread.
    """

    def __init__(self) -> None:
        self._listeners: tuple[tuple[Listen, bool], ...] = ()  # and whether it wants traces
        self._changing = Lock()

    @property
    def has_listeners(self) -> bool:
        """Is it worth building an event?"""
        return bool(self._listeners)

    @property
    def wants_traces(self) -> bool:
        """Is it worth asking the policy for trace and text?"""
        return any(wants for _, wants in self._listeners)

    def listen(self, listener: Listen, wants_traces: bool = True) -> Callable[[], None]:
        """Call `listener` with every event until the returned function is called."""
        entry = (listener, wants_traces)
        with self._changing:
            self._listeners = (*self._listeners, entry)

        def stop() -> None:
            with self._changing:
                self._listeners = tuple(one for one in self._listeners if one is not entry)

        return stop

    def publish(self, event: Event) -> None:
        """Tell every listener; one that raises does not disturb the others, nor the robot."""
        for listener, _ in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener failed on %s", type(event).__name__)
