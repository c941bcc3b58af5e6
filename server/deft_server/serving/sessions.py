"""What the server keeps of every robot between its frames. Knows nothing of HTTP or the policy.

A session is created by its first frame and ends by a reset, after a while without frames, or when
there are too many and it was used least recently. Sessions of different callers never meet, even
under the same id.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deft_policies.memory import SessionMemory


@dataclass(eq=False)
class RobotSession:
    """One robot. The memory is what its next frame is answered with."""

    caller: str
    session_id: str | None  # None for a frame that named no session: it ends with its answer
    used_s: float
    memory: SessionMemory = SessionMemory()
    num_answers: int = 0

    @property
    def flow(self) -> str:
        """The name of this session, or of its caller's unnamed frames, in the waiting line."""
        return flow_of(self.caller, self.session_id)

    def learn(self, memory: SessionMemory) -> None:
        """Take in what a policy remembers; what was sent last is the server's to say."""
        self.memory = replace(memory, last_action=self.memory.last_action)

    def sent(self, action: NDArray[np.float64]) -> None:
        """Note the last action [action_dim] of an answer."""
        self.num_answers += 1
        self.memory = replace(self.memory, last_action=tuple(action.tolist()))


def flow_of(caller: str, session_id: str | None) -> str:
    """Return a name that no other caller's session can have."""
    return (
        f"{len(caller)}:{caller}" if session_id is None else f"{len(caller)}:{caller}:{session_id}"
    )


class SessionStore:
    """All named sessions, least recently used first."""

    def __init__(self, ttl_s: float, max_sessions: int) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[tuple[str, str], RobotSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, caller: str, session_id: str | None, now_s: float) -> RobotSession:
        """Return the session, a new one if there is none or it has expired."""
        if session_id is None:
            return RobotSession(caller, None, now_s)
        self.expire(now_s)
        key = (caller, session_id)
        session = self._sessions.get(key)
        if session is None:
            session = RobotSession(caller, session_id, now_s)
            self._sessions[key] = session
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        session.used_s = now_s
        self._sessions.move_to_end(key)
        return session

    def reset(self, caller: str, session_id: str) -> bool:
        """Forget a session; return whether there was one."""
        return self._sessions.pop((caller, session_id), None) is not None

    def names(self) -> list[tuple[str, str]]:
        """Return the caller and id of every session."""
        return list(self._sessions)

    def expire(self, now_s: float) -> None:
        """Forget the sessions that had no frame for the time to live."""
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if now_s - oldest.used_s <= self._ttl_s:
                return
            self._sessions.popitem(last=False)
