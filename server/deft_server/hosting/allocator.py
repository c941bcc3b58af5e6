"""Has the allocator keep freed memory: fresh pages for every frame cost more than its copies."""

import ctypes
import sys
from collections.abc import Callable

_KEPT_BYTES = 16 * 1024 * 1024
_LARGEST_KEPT_BYTES = 4 * 1024 * 1024  # frames of cameras; what is larger is given back at once
_NUM_ARENAS = 1  # each keeps what was freed in it, and the interpreter lets one thread run
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> bool:
    """Tell the allocator; return whether it could be told (glibc only)."""
    mallopt = _of_glibc("mallopt")
    wanted = {
        _M_ARENA_MAX: _NUM_ARENAS,
        _M_TRIM_THRESHOLD: _KEPT_BYTES,
        _M_MMAP_THRESHOLD: _LARGEST_KEPT_BYTES,
    }
    return mallopt is not None and all(mallopt(*one) == 1 for one in wanted.items())


def give_back_freed_memory() -> None:
    """Have the allocator give back what is free between what is in use, too (glibc only).

    On its own it gives back no more than its end, where a flood leaves small things behind.
    """
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(_KEPT_BYTES)


def _of_glibc(name: str) -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)  # musl has neither
