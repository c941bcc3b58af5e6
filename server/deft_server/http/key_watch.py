"""Ends the connections of callers whose API key was taken out of the file."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from deft_server.errors import MissingKeyError
from deft_server.http.caller_watch import Cancellation
from deft_server.serving.access import RECHECK_S, Access, Caller


class KeyWatch:
    """Looks at the key file once a second for as long as anything is open."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._open: dict[Cancellation, Caller] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watching(self, caller: Caller) -> Iterator[None]:
        """Raise `MissingKeyError` out of the block as soon as the caller's key is gone."""
        if not self._access.needs_key:
            yield
            return
        cancellation = Cancellation()
        self._open[cancellation] = caller
        if self._timer is None:
            self._wait()
        try:
            yield
        except asyncio.CancelledError:
            if cancellation.was_ours():
                self._access.require_known(caller)
            raise
        finally:
            del self._open[cancellation]

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(RECHECK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        for cancellation, caller in list(self._open.items()):
            try:
                self._access.require_known(caller)
            except MissingKeyError:
                cancellation.cancel()
        if self._open:
            self._wait()
