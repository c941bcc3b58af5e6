"""Whether the server can answer frames, and if not, why."""

from enum import Enum

from deft_server.errors import NotReadyError


class ServerPhase(Enum):
    """Where the server is in its life."""

    LOADING = "loading"
    READY = "ready"
    FAILING = "failing"  # every recent batch failed; frames are still tried
    STUCK = "stuck"  # the policy does not come back
    BROKEN = "broken"  # the policy could not be loaded
    DRAINING = "draining"  # stopping: frames in hand are finished, new ones refused


_SENTENCES = {
    ServerPhase.LOADING: "the policy is loading",
    ServerPhase.READY: "ready",
    ServerPhase.FAILING: "the policy failed on every recent batch",
    ServerPhase.STUCK: "the policy hangs",
    ServerPhase.BROKEN: "the policy could not be loaded",
    ServerPhase.DRAINING: "the server is stopping",
}
_TAKES_FRAMES = (ServerPhase.READY, ServerPhase.FAILING)


class Readiness:
    """The phase the server is in. Draining is final."""

    def __init__(self) -> None:
        self._phase = ServerPhase.LOADING
        self._detail = ""

    @property
    def phase(self) -> ServerPhase:
        """Where the server is in its life."""
        return self._phase

    @property
    def sentence(self) -> str:
        """The phase in words, with what is known about its cause."""
        return f"{_SENTENCES[self._phase]}{self._detail and ': '}{self._detail}"

    def enter(self, phase: ServerPhase, detail: str = "") -> None:
        """Go to another phase, unless the server is stopping already."""
        if self._phase is not ServerPhase.DRAINING:
            self._phase, self._detail = phase, detail

    def require(self) -> None:
        """Raise `NotReadyError` where no frame can be taken."""
        if self._phase not in _TAKES_FRAMES:
            raise NotReadyError(self.sentence)

    def require_health(self) -> None:
        """Raise `NotReadyError` where a frame would hardly be answered: for load balancers."""
        if self._phase is not ServerPhase.READY:
            raise NotReadyError(self.sentence)
