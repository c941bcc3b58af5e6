"""Memory that two processes share, for the frames of one batch. It has no name and leaves nothing.

The sender writes a batch, says where, and writes again only when the batch has been answered.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Sequence

_SMALLEST_BYTES = 1024 * 1024


class FrameBlock:
    """Grows to the largest batch there was. Whoever opens it owns the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, 0)

    @staticmethod
    def create() -> "FrameBlock":
        """A block that nobody else knows yet."""
        if sys.platform.startswith("linux"):  # not on /dev/shm, which is small in containers
            descriptor = os.memfd_create("deft-frames")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, _SMALLEST_BYTES)
        return FrameBlock(descriptor)

    def write(self, parts: Sequence[bytes]) -> None:
        """Lay the parts one after the other from the start; grow if they do not fit."""
        needed = sum(map(len, parts))
        if needed > len(self._map):
            os.ftruncate(self.descriptor, max(needed, 2 * len(self._map)))
            self._map_again()
        self._map.seek(0)
        for part in parts:
            self._map.write(part)

    def read(self, sizes: Sequence[int]) -> list[bytes]:
        """Return copies of parts of these sizes."""
        if sum(sizes) > len(self._map):
            self._map_again()
        self._map.seek(0)
        return [self._map.read(size) for size in sizes]

    def close(self) -> None:
        """Let go of it here; the other process keeps its own."""
        self._map.close()
        os.close(self.descriptor)

    def _map_again(self) -> None:
        self._map.close()
        self._map = mmap.mmap(self.descriptor, 0)
