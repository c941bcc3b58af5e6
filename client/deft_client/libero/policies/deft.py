"""A Deft server as the evaluation sees it: one session per episode, traces with every answer."""

from dataclasses import replace

from deft_client.client import PolicyClient
from deft_client.types import ActionChunk, ActOptions, Observation


class DeftPolicy:
    """A Deft server."""

    def __init__(self, client: PolicyClient, options: ActOptions) -> None:
        self._client = client
        self._options = options

    def start(self, session_id: str) -> None:
        """Open a session that knows nothing of earlier episodes."""
        self._options = replace(self._options, session_id=session_id)
        self._client.reset(session_id)

    def act(self, observation: Observation) -> ActionChunk:
        """Ask for the actions that follow an observation."""
        return self._client.act(observation, self._options)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
