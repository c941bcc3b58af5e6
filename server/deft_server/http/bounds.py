"""What all connections of a server share: how many there may be, and what bounds each.

Pure counting: knows nothing of sockets or messages.
"""

import ipaddress
from collections import Counter
from dataclasses import dataclass, field

from deft_server.http.fair_calls import FairCalls
from deft_server.serving.held_bytes import HeldBytes
from deft_server.settings import Settings

SPARE_CONNECTIONS = 64  # beyond `max_connections`, for answers that say so
MAX_HEADERS = 100
MAX_URL_BYTES = 8000  # the WebSocket library takes lines of 8192 at most
MAX_PIPELINED = 16  # requests that arrive before the one in hand is answered
SMALL_BODY_BYTES = 2048  # of requests that are not frames: a name, at most, however escaped
MAX_CONTENT_TYPE_CHARS = 256  # with the longest boundary there may be


@dataclass(eq=False)
class ConnectionCounts:
    """How many connections are open, in all and from every address; handshakes count."""

    most: int
    most_per_address: int
    proxies: tuple[str, ...] = ()  # addresses that stand for many callers
    total: int = 0
    by_address: Counter[str] = field(default_factory=Counter)

    def enter(self, address: str) -> bool:
        """Count one more connection, or return False: there are enough."""
        if self.total >= self.most + SPARE_CONNECTIONS:
            return False
        if self.by_address[address] >= self.most_per_address and not self._is_proxy(address):
            return False
        self.total += 1
        self.by_address[address] += 1
        return True

    def leave(self, address: str) -> None:
        """Count one connection less."""
        self.total -= 1
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]

    def _is_proxy(self, address: str) -> bool:
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(ip in ipaddress.ip_network(one) for one in self.proxies)


@dataclass(frozen=True, eq=False)
class ConnectionBounds:
    """The bounds of every single connection, and the counts that all of them share."""

    max_header_bytes: int
    header_timeout_s: float
    message_timeout_s: float
    held: HeldBytes
    connections: ConnectionCounts
    calls: FairCalls = field(default_factory=FairCalls)


def build_bounds(settings: Settings, held: HeldBytes) -> ConnectionBounds:
    """Return the bounds that the settings ask for, with no connection counted yet."""
    return ConnectionBounds(
        max_header_bytes=settings.max_header_bytes,
        header_timeout_s=settings.header_timeout_s,
        message_timeout_s=settings.body_timeout_s,
        held=held,
        connections=ConnectionCounts(
            settings.max_connections,
            settings.max_connections_per_address,
            settings.trusted_proxies,
        ),
    )
