"""What the allocator gives back."""

import platform
from pathlib import Path

import pytest

from deft_server.hosting.allocator import give_back_freed_memory

PIECE, NUM_PIECES = 100_000, 400


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's own way")
def test_what_is_free_between_small_things_is_given_back():
    """Once 65 MB of a flood stayed below what it had left behind."""
    flood: list[bytes] = []
    left: list[bytes] = []
    for number in range(NUM_PIECES):
        flood.append(bytes([number % 255 + 1]) * PIECE)
        left.append(bytes([number % 255 + 1]) * 1000)
    flood.clear()
    before = resident_bytes()
    give_back_freed_memory()
    assert before - resident_bytes() > NUM_PIECES * PIECE / 2
    assert len(left) == NUM_PIECES
