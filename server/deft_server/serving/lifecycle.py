"""Where the server is in its life, and when a policy that was lost is loaded again."""

from collections import Counter
from collections.abc import Callable
from enum import Enum
from operator import itemgetter
from typing import Literal

from deft_server.errors import NotReadyError

STEADY_S = 60.0  # a policy that was ready for so long has lasted
LONGEST_PAUSE_S = 30.0  # before a policy that was lost is loaded again


class ServerPhase(Enum):
    """Where the server is in its life."""

    LOADING = "loading"
    READY = "ready"
    FAILING = "failing"  # all recent batches failed or answers were unsafe; frames are still tried
    STUCK = "stuck"  # the policy does not come back
    BROKEN = "broken"  # the policy could not be loaded
    DRAINING = "draining"  # stopping: frames in hand are finished, new ones refused


# What, a few times in a row, makes a server not ready; frames are still tried.
Trouble = Literal["batches failed", "answers were unsafe"]


_SENTENCES = {
    ServerPhase.LOADING: "the policy is loading",
    ServerPhase.READY: "ready",
    ServerPhase.FAILING: "the policy fails",
    ServerPhase.STUCK: "the policy hangs",
    ServerPhase.BROKEN: "the policy could not be loaded",
    ServerPhase.DRAINING: "the server is stopping",
}
_TAKES_FRAMES = (ServerPhase.READY, ServerPhase.FAILING)


class Readiness:
    """The phase the server is in. Draining is final."""

    def __init__(self, unready_after: int) -> None:
        """`unready_after` failures of a kind in a row make the server not ready."""
        self._unready_after = unready_after
        self._phase = ServerPhase.LOADING
        self._detail = ""
        self.progress: Callable[[], str] = lambda: ""  # what is done while the policy loads
        self._in_a_row: Counter[Trouble] = Counter()

    @property
    def phase(self) -> ServerPhase:
        """Where the server is in its life."""
        return self._phase

    @property
    def sentence(self) -> str:
        """The phase in words, with what is known about its cause."""
        detail = self._detail
        if self._phase is ServerPhase.LOADING:
            detail = "; ".join(one for one in (detail, self.progress()) if one)
        return f"{_SENTENCES[self._phase]}{detail and ': '}{detail}"

    def enter(self, phase: ServerPhase, detail: str = "") -> None:
        """Go to another phase, unless the server is stopping already."""
        if self._phase is not ServerPhase.DRAINING:
            self._phase, self._detail = phase, detail
            self._in_a_row.clear()

    def note(self, trouble: Trouble, is_over: bool) -> None:
        """Count what went wrong, or start to count anew because it went well."""
        if is_over and trouble not in self._in_a_row:
            return
        if is_over:
            del self._in_a_row[trouble]
        else:
            self._in_a_row[trouble] += 1
        if self._phase in _TAKES_FRAMES:
            worst, count = max(self._in_a_row.items(), key=itemgetter(1), default=(trouble, 0))
            is_failing = count >= self._unready_after
            self._phase = ServerPhase.FAILING if is_failing else ServerPhase.READY
            self._detail = f"{count} {worst} in a row" if is_failing else ""

    def require(self) -> None:
        """Raise `NotReadyError` unless frames are accepted."""
        if self._phase not in _TAKES_FRAMES:
            raise NotReadyError(self.sentence)

    def require_health(self) -> None:
        """Raise `NotReadyError` unless the phase is READY; `/readyz` asks this."""
        if self._phase is not ServerPhase.READY:
            raise NotReadyError(self.sentence)


class Reloads:
    """How long to wait before a policy is loaded again: ever longer, until one has lasted."""

    def __init__(self) -> None:
        self.has_loaded = False  # whether there ever was a policy
        self._loaded_s: float | None = None  # when the policy in use was ready
        self._num_losses = 0

    def loaded(self, now_s: float) -> None:
        """Note that a policy is ready."""
        self.has_loaded, self._loaded_s = True, now_s

    def pause_s(self, now_s: float) -> float:
        """Count a loss, and return the seconds to wait: none after the first."""
        if self._loaded_s is not None and now_s - self._loaded_s > STEADY_S:
            self._num_losses = 0
        self._loaded_s = None
        self._num_losses += 1
        if self._num_losses == 1:
            return 0.0
        return min(2.0 ** (self._num_losses - 2), LONGEST_PAUSE_S)
