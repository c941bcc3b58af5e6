"""How large a message may be, and how much memory the pictures of one message may take."""

from collections.abc import Callable
from dataclasses import dataclass

MAX_DECODABLE_PIXELS = 64 * 1024 * 1024  # below where the image library itself starts to warn


@dataclass(frozen=True)
class WireLimits:
    """Upper bounds for one message, both directions."""

    max_bytes: int = 16 * 1024 * 1024
    max_answer_bytes: int = 2 * 1024 * 1024  # to one observation; a number may take 32 for its 1
    max_image_side: int = 4096  # pixels
    max_image_pixels: int = 4 * 1024 * 1024
    max_cameras: int = 8  # besides the main image
    max_observations: int = 32  # in one message
    max_instruction_chars: int = 4096
    max_name_chars: int = 128  # session ids, keys, camera names
    max_state_dim: int = 1024
    max_action_values: int = 65_536  # steps x action_dim
    max_lists: int = 16_384  # maps and lists, in JSON and in a peer's frame
    max_entries: int = 131_072  # of all of them together

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1:
            raise ValueError(f"every limit must be at least 1, got {self}")
        if self.max_image_pixels > MAX_DECODABLE_PIXELS:
            raise ValueError(
                f"max_image_pixels may be {MAX_DECODABLE_PIXELS} at most, "
                f"got {self.max_image_pixels}"
            )


DEFAULT_LIMITS = WireLimits()


def _hold_nothing(num_bytes: int) -> None:
    """Nobody bounds what all messages hold together."""


@dataclass
class ReadContext:
    """How the pictures of one message are read.

    `hold` is told how many bytes a picture will take before it is decoded, and may raise.
    """

    limits: WireLimits = DEFAULT_LIMITS
    hold: Callable[[int], None] = _hold_nothing
    num_claimed: int = 0  # pixels of the pictures so far that take more memory than their message
