"""What every way of asking for actions looks like to a robot's control loop."""

from typing import Protocol

from deft_client.types import ActionChunk, ActOptions, Observation


class ActingPolicy(Protocol):
    """A policy as its caller sees it: `PolicyClient`, `StreamClient`, `Recorder`, or one's own."""

    @property
    def session_id(self) -> str:
        """The session of acts and resets that name no other."""

    def act(self, observation: Observation, options: ActOptions | None = None) -> ActionChunk:
        """Return the actions that follow an observation."""

    def reset(self, session_id: str | None = None) -> None:
        """Say that an episode starts."""
