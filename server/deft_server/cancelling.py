"""Cancels the task in hand for a reason of our own, and turns that back into an exception."""

import asyncio
import sys


class Cancellation:
    """One task that may be cancelled by us; tells our cancellation from anybody else's."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._was_ours = False

    def cancel(self) -> None:
        """Cancel the task this was made on."""
        self._was_ours = True
        self._task.cancel()

    def was_ours(self) -> bool:
        """Is the `CancelledError` just caught of our making? If so the task lives on."""
        if self._was_ours and sys.version_info >= (3, 11):
            self._task.uncancel()
        return self._was_ours
