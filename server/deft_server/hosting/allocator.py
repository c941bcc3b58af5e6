"""Has the allocator keep freed memory: fresh pages for every frame cost more than its copies."""

import ctypes
import sys

_KEPT_BYTES = 16 * 1024 * 1024
_LARGEST_KEPT_BYTES = 4 * 1024 * 1024  # frames of cameras; what is larger is given back at once
_NUM_ARENAS = 1  # each keeps what was freed in it, and the interpreter lets one thread run
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> bool:
    """Tell the allocator; return whether it could be told (glibc only)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    wanted = {
        _M_ARENA_MAX: _NUM_ARENAS,
        _M_TRIM_THRESHOLD: _KEPT_BYTES,
        _M_MMAP_THRESHOLD: _LARGEST_KEPT_BYTES,
    }
    return all(mallopt(option, value) == 1 for option, value in wanted.items())
