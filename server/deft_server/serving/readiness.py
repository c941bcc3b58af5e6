"""Whether the server can answer frames, and if not, why."""

from enum import Enum

from deft_server.errors import NotReadyError


class Phase(Enum):
    """Where the server is in its life."""

    LOADING = "loading"
    READY = "ready"
    FAILING = "failing"  # every recent batch failed; frames are still tried
    STUCK = "stuck"  # the policy does not come back
    BROKEN = "broken"  # the policy could not be loaded
    DRAINING = "draining"  # stopping: frames in hand are finished, new ones refused


_SENTENCES = {
    Phase.LOADING: "the policy is loading",
    Phase.READY: "ready",
    Phase.FAILING: "the policy failed on every recent batch",
    Phase.STUCK: "the policy hangs",
    Phase.BROKEN: "the policy could not be loaded",
    Phase.DRAINING: "the server is stopping",
}
_TAKES_FRAMES = (Phase.READY, Phase.FAILING)


class Readiness:
    """The phase the server is in. Draining is final."""

    def __init__(self) -> None:
        self._phase = Phase.LOADING
        self._detail = ""

    @property
    def phase(self) -> Phase:
        """Where the server is in its life."""
        return self._phase

    @property
    def sentence(self) -> str:
        """The phase in words, with what is known about its cause."""
        return f"{_SENTENCES[self._phase]}{self._detail and ': '}{self._detail}"

    def enter(self, phase: Phase, detail: str = "") -> None:
        """Go to another phase, unless the server is stopping already."""
        if self._phase is not Phase.DRAINING:
            self._phase, self._detail = phase, detail

    def require(self) -> None:
        """Raise `NotReadyError` where no frame can be taken."""
        if self._phase not in _TAKES_FRAMES:
            raise NotReadyError(self.sentence)

    def require_health(self) -> None:
        """Raise `NotReadyError` where a frame would hardly be answered: for load balancers."""
        if self._phase is not Phase.READY:
            raise NotReadyError(self.sentence)
