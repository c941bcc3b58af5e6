"""What all connections of a server share: how many there may be, and how many bytes they hold.

Pure counting: knows nothing of sockets or messages.
"""

import ipaddress
from collections import Counter
from dataclasses import dataclass, field

from deft_server.errors import OverloadedError
from deft_server.settings import Settings

SPARE_CONNECTIONS = 64  # beyond `max_connections`, for answers that say so
MAX_HEADERS = 100
MAX_URL_BYTES = 8000  # the WebSocket library takes lines of 8192 at most
MAX_PIPELINED = 16  # requests that arrive before the one in hand is answered
SMALL_BODY_BYTES = 2048  # of requests that are not frames: a name, at most, however escaped
MAX_CONTENT_TYPE_CHARS = 256  # with the longest boundary there may be
BUSY_FOR_S = 1.0


@dataclass(eq=False)
class HeldBytes:
    """The bytes of all requests and messages that were received and not answered yet, and of the
    large pictures decoded from them.

    Where they are too many, only addresses that hold more than their share are refused.
    """

    most: int
    now: int = 0
    by_address: Counter[str] = field(default_factory=Counter)

    def hold(self, num_bytes: int, address: str) -> None:
        """Count bytes as held, or raise `OverloadedError`; they are counted in any case."""
        self.release(-num_bytes, address)
        held = self.by_address[address]
        if num_bytes > 0 and self.now > self.most < held * len(self.by_address):
            raise OverloadedError(
                f"too many bytes of requests are in hand: over {self.most}, see max_total_bytes",
                BUSY_FOR_S,
            )

    def release(self, num_bytes: int, address: str) -> None:
        """Count bytes as gone."""
        self.now -= num_bytes
        self.by_address[address] -= num_bytes
        if not self.by_address[address]:
            del self.by_address[address]


@dataclass(eq=False)
class ConnectionCounts:
    """How many connections are open, in all and from every address."""

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


class ConnectionBounds:
    """The bounds of every single connection, and the counts that all of them share."""

    def __init__(self, settings: Settings) -> None:
        self.max_header_bytes = settings.max_header_bytes
        self.header_timeout_s = settings.header_timeout_s
        self.message_timeout_s = settings.body_timeout_s
        self.held = HeldBytes(settings.max_total_bytes)
        self.connections = ConnectionCounts(
            settings.max_connections,
            settings.max_connections_per_address,
            settings.trusted_proxies,
        )
