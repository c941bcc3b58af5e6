"""What the server keeps of every robot between its frames. Knows nothing of HTTP or the policy.

A session is created by its first frame and ends by a reset, after a while without frames, or when
there are too many: then the caller with the most loses the one it used least recently, so that
nobody can push out another's. Sessions of different callers never meet, even under the same id.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import randbits

from deft_policies.memory import SessionMemory


@dataclass(eq=False)
class RobotSession:
    """One robot. The memory is what its next frame is answered with."""

    caller: str
    session_id: str | None  # None for a frame that named no session: it ends with its answer
    used_s: float
    memory: SessionMemory = field(default_factory=lambda: SessionMemory(noise=randbits(63)))
    num_answers: int = 0

    @property
    def flow(self) -> str:
        """The name of this session, or of its caller's unnamed frames, in the queue."""
        return flow_of(self.caller, self.session_id)


def flow_of(caller: str, session_id: str | None) -> str:
    """Return a name that no other caller's session can have."""
    return (
        f"{len(caller)}:{caller}" if session_id is None else f"{len(caller)}:{caller}:{session_id}"
    )


class SessionStore:
    """All named sessions by caller, least recently used first."""

    def __init__(
        self, ttl_s: float, max_sessions: int, on_end: Callable[[str, str], None] = lambda *_: None
    ) -> None:
        """`on_end` is called with the caller and id of every session that ends."""
        self._on_end = on_end
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._sessions: dict[str, OrderedDict[str, RobotSession]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def open(self, caller: str, session_id: str | None, now_s: float) -> RobotSession:
        """Return the session, a new one if there is none or it has expired."""
        if session_id is None:
            return RobotSession(caller, None, now_s)
        sessions = self._sessions.get(caller)
        session = None if sessions is None else sessions.get(session_id)
        if session is not None and self._has_expired(session, now_s):
            self._drop(caller, session_id)
            session = None
        own = self._sessions.setdefault(caller, OrderedDict())
        if session is None:
            session = own[session_id] = RobotSession(caller, session_id, now_s)
            self._count += 1
            if self._count > self._max_sessions:
                most = max(self._sessions, key=lambda name: len(self._sessions[name]))
                self._drop(most, next(iter(self._sessions[most])))
        session.used_s = now_s
        own.move_to_end(session_id)
        return session

    def reset(self, caller: str, session_id: str) -> bool:
        """Forget a session; return whether there was one."""
        existed = session_id in self._sessions.get(caller, ())
        if existed:
            self._drop(caller, session_id)
        return existed

    def names(self) -> list[tuple[str, str]]:
        """Return the caller and id of every session."""
        return [(caller, one) for caller, own in self._sessions.items() for one in own]

    def expire(self, now_s: float) -> None:
        """Forget the sessions that had no frame for the time to live; call it now and then."""
        for caller, own in list(self._sessions.items()):
            while own:
                oldest_id, oldest = next(iter(own.items()))
                if not self._has_expired(oldest, now_s):
                    break
                self._drop(caller, oldest_id)

    def _has_expired(self, session: RobotSession, now_s: float) -> bool:
        return now_s - session.used_s > self._ttl_s

    def _drop(self, caller: str, session_id: str) -> None:
        own = self._sessions[caller]
        del own[session_id]
        self._count -= 1
        if not own:
            del self._sessions[caller]
        self._on_end(caller, session_id)
