"""uvicorn's HTTP protocol with a clock on the headers, which uvicorn itself lacks.

Without it, a connection that sends half a request line stays open for ever.
"""

import asyncio
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def build_protocol(timeout_s: float) -> type[asyncio.Protocol]:
    """Return the fastest HTTP protocol there is, with a limit on how long headers may take."""
    if find_spec("httptools") is not None:
        base = import_module("uvicorn.protocols.http.httptools_impl").HttpToolsProtocol
    else:
        base = import_module("uvicorn.protocols.http.h11_impl").H11Protocol
    return type("ClockedProtocol", (_HeaderClock, base), {"header_timeout_s": timeout_s})


class _HeaderClock:
    """Closes a connection whose headers do not come. Goes before one of uvicorn's protocols."""

    header_timeout_s: float
    # What uvicorn's protocols bring; none of it is typed there.
    transport: Any
    loop: Any
    cycle: Any

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # type: ignore[misc]
        if not self._is_reading_headers():
            self._stop_clock()
        elif self._timer is None:
            self._start_clock()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(error)  # type: ignore[misc]

    def _is_reading_headers(self) -> bool:
        if self.transport.get_protocol() is not self or self.transport.is_closing():
            return False  # upgraded to a WebSocket, or on its way out
        return self.cycle is None or bool(self.cycle.response_complete)

    def _start_clock(self) -> None:
        self._timer = self.loop.call_later(self.header_timeout_s, self.transport.close)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
