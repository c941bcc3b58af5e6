"""What the allocator gives back."""

import platform
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from deft_server.commands.serve import give_back_freed_memory, keep_freed_memory

PIECE, NUM_PIECES = 100_000, 400


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def given_back_bytes() -> int:
    keep_freed_memory()
    flood: list[bytes] = []
    left: list[bytes] = []
    for number in range(NUM_PIECES):
        flood.append(bytes([number % 255 + 1]) * PIECE)
        left.append(bytes([number % 255 + 1]) * (PIECE // 20))
    flood.clear()
    before = resident_bytes()
    give_back_freed_memory()
    assert len(left) == NUM_PIECES
    return before - resident_bytes()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's own way")
def test_what_is_free_between_small_things_is_given_back():
    """Once 45 MB of a flood stayed below what it had left behind."""
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # with no holes of other tests
        assert fresh.submit(given_back_bytes).result() > NUM_PIECES * PIECE / 2
