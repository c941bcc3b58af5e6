"""Notices where the policy's round does not come back. Lives on the event loop."""

import asyncio
import time
from collections.abc import Callable

from deft_server.serving.hosting import PolicyHost

CHECKS = 10  # in the time that a round may take
MIN_WAIT_S = 0.001  # so that every look brings the end nearer, however late timers are


class HangWatch:
    """Calls `on_hang` where a round takes longer than `after_s`.

    Time in which the whole process stood still is not the round's: a timer that comes late tells
    how much it was. A paused container, a moved machine or a debugger is no hang.
    """

    def __init__(self, after_s: float, on_hang: Callable[[], None]) -> None:
        self._after_s = after_s
        self._on_hang = on_hang
        self._timer: asyncio.TimerHandle | None = None
        self._began_s = 0.0  # the round, monotonic, and later by the time in which nothing ran

    @property
    def is_on(self) -> bool:
        """Whether it watches."""
        return self._timer is not None

    def restart(self, host: PolicyHost) -> None:
        """Watch the round that begins now. Hangs of replicas are ended elsewhere."""
        self.stop()
        if host.last_round_s is not None:
            self._began_s = time.monotonic()
            self._wait(host, self._began_s)

    def stop(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, host: PolicyHost, now_s: float) -> None:
        left_s = self._began_s + self._after_s - now_s
        seconds = max(MIN_WAIT_S, min(left_s, self._after_s / CHECKS))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._check, host, now_s + seconds)

    def _check(self, host: PolicyHost, due_s: float) -> None:
        """Wait on where a round has ended lately, though no frame has."""
        now_s = time.monotonic()
        late_s = max(0.0, now_s - due_s)
        self._began_s = min(now_s, max(self._began_s, host.last_round_s or 0.0) + late_s)
        if now_s < self._began_s + self._after_s:
            self._wait(host, now_s)
        else:
            self._timer = None
            self._on_hang()
