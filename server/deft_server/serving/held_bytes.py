"""How many bytes a server holds for its callers, and for whom.

Pure counting: knows nothing of sockets or messages.
"""

from dataclasses import dataclass, field

from deft_server.errors import OverloadedError

BUSY_FOR_S = 1.0


@dataclass(eq=False)
class HeldBytes:
    """The bytes of all requests and messages that were received and not answered yet, and of the
    large pictures decoded from them.

    Where they are too many, only addresses that hold more than their share are refused.
    """

    most: int
    now: int = 0
    by_address: dict[str, int] = field(default_factory=dict)

    def hold(self, num_bytes: int, address: str) -> None:
        """Count bytes as held, or raise `OverloadedError`; they are counted in any case."""
        self.release(-num_bytes, address)
        held = self.by_address.get(address, 0)
        if num_bytes > 0 and self.now > self.most < held * len(self.by_address):
            raise OverloadedError(
                f"too many bytes of requests are in hand: over {self.most}, see max_total_bytes",
                BUSY_FOR_S,
            )

    def release(self, num_bytes: int, address: str) -> None:
        """Count bytes as gone."""
        self.now -= num_bytes
        left = self.by_address.get(address, 0) - num_bytes
        if left:
            self.by_address[address] = left
        else:
            self.by_address.pop(address, None)
