"""Notices where the policy's round does not come back. Lives on the event loop."""

import asyncio
import time
from collections.abc import Callable

from deft_server.serving.hosting import PolicyHost


class HangWatch:
    """Calls `on_hang` where a round takes longer than `after_s`."""

    def __init__(self, after_s: float, on_hang: Callable[[], None]) -> None:
        self._after_s = after_s
        self._on_hang = on_hang
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_on(self) -> bool:
        """Whether it watches."""
        return self._timer is not None

    def restart(self, host: PolicyHost) -> None:
        """Watch the round that begins now. Hangs of replicas are ended elsewhere."""
        self.stop()
        if host.last_round_s is not None:
            self._wait(host, self._after_s)

    def stop(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, host: PolicyHost, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look, host)

    def _look(self, host: PolicyHost) -> None:
        """Wait on where a round has ended lately, though no frame has."""
        left_s = (host.last_round_s or 0.0) + self._after_s - time.monotonic()
        if left_s > 0:
            self._wait(host, left_s)
        else:
            self._timer = None
            self._on_hang()
