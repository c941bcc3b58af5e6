"""How much a peer may ask us to hold. Checked before anything is allocated or decoded."""

from dataclasses import dataclass

MAX_DECODABLE_PIXELS = 64 * 1024 * 1024  # below where the image library itself starts to warn


@dataclass(frozen=True)
class WireLimits:
    """Upper bounds for one message, both directions."""

    max_bytes: int = 16 * 1024 * 1024
    max_image_side: int = 4096  # pixels
    max_image_pixels: int = 4 * 1024 * 1024
    max_cameras: int = 8  # besides the main image
    max_instruction_chars: int = 4096
    max_name_chars: int = 128  # session ids, keys, camera names
    max_state_dim: int = 1024
    max_action_values: int = 65_536  # steps x action_dim
    max_trace_values: int = 65_536  # numbers in any one list of a decode trace
    max_lists: int = 16_384  # maps and lists in one binary message
    max_json_lists: int = 400_000  # the same for JSON, where an image may be nested lists

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1:
            raise ValueError(f"every limit must be at least 1, got {self}")
        if self.max_image_pixels > MAX_DECODABLE_PIXELS:
            raise ValueError(
                f"max_image_pixels may be {MAX_DECODABLE_PIXELS} at most, "
                f"got {self.max_image_pixels}"
            )


DEFAULT_LIMITS = WireLimits()
