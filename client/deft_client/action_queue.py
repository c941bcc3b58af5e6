"""Hands out a chunk of actions one at a time, and says when to ask for the next chunk."""

from collections import deque

from deft_client.action_rules import Action
from deft_client.types import ActionChunk


class ActionQueue:
    """The actions still to be executed.

    `execute` limits how many actions of a chunk are used before a fresh observation is worth more
    than the rest of the plan; None means all of them.
    """

    def __init__(self, execute: int | None = None) -> None:
        if execute is not None and execute < 1:
            raise ValueError(f"execute must be at least 1 action of each chunk, got {execute}")
        self._execute = execute
        self._actions: deque[Action] = deque()

    def __len__(self) -> int:
        return len(self._actions)

    @property
    def is_empty(self) -> bool:
        """Is it time to ask the policy again?"""
        return not self._actions

    def refill(self, chunk: ActionChunk) -> None:
        """Replace what is left by the actions of a newer chunk."""
        self._actions = deque(chunk.actions[: self._execute])

    def next(self) -> Action:
        """Take the next action."""
        if not self._actions:
            raise IndexError("the queue is empty: refill it with the answer to a new observation")
        return self._actions.popleft()

    def clear(self) -> None:
        """Forget what is left: an episode starts, or something went wrong."""
        self._actions.clear()
