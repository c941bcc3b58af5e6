"""Has the C library keep the memory of one frame for the next.

glibc returns large blocks to the system as soon as they are free. A request with a camera frame
takes several of them, and getting them back costs a page fault for every 4 kB: a millisecond and
more for `POST /act`, whose text is a third larger than its pixels.
"""

import ctypes
import sys

_KEPT_BYTES = 64 * 1024 * 1024
_LARGEST_KEPT_BYTES = 32 * 1024 * 1024  # the most that glibc allows
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Tell the allocator; return whether it could be told (glibc only)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    kept = mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES) == 1
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES) == 1 and kept)
