"""Finds an OpenGL library that renders without a screen: EGL first, OSMesa where there is none.

Knows nothing of MuJoCo. The question is asked with ctypes before anything else is loaded, because
MuJoCo and PyOpenGL settle on one library at their first import and cannot change afterwards.
"""

import ctypes
import os
import sys
from collections.abc import Callable, MutableMapping
from enum import Enum

from deft_libero.errors import GraphicsError

APT_LINE = "sudo apt-get install -y libegl1 libegl-mesa0 libgl1 libopengl0"
APT_LINE_OSMESA = "sudo apt-get install -y libosmesa6"

_PLATFORM_DEVICE = 0x313F  # EGL_PLATFORM_DEVICE_EXT
_MAX_DEVICES = 16

LibraryLoader = Callable[[str], ctypes.CDLL]


class Renderer(Enum):
    """Who draws. AUTO takes EGL if it works, else OSMesa; NONE simulates physics only."""

    AUTO = "auto"
    EGL = "egl"
    OSMESA = "osmesa"
    NONE = "disable"


def find_renderer(wanted: Renderer, load: LibraryLoader = ctypes.CDLL) -> Renderer:
    """The renderer to use; GraphicsError with the apt line when what is wanted is not there.

    `MUJOCO_GL=egl|osmesa` in the environment settles AUTO.
    """
    if wanted is Renderer.NONE:
        return wanted
    named = os.environ.get("MUJOCO_GL", "").strip().lower()
    if wanted is Renderer.AUTO and named in (Renderer.EGL.value, Renderer.OSMESA.value):
        wanted = Renderer(named)
    problems = []
    for renderer, check in ((Renderer.EGL, _egl_problem), (Renderer.OSMESA, _osmesa_problem)):
        if wanted in (Renderer.AUTO, renderer):
            problem = check(load)
            if problem is None:
                return renderer
            problems.append(f"{renderer.name}: {problem}")
    raise GraphicsError(
        f"no OpenGL library can render off screen ({'; '.join(problems)}). "
        f"Install one: {APT_LINE}   (or the slower {APT_LINE_OSMESA})"
    )


def announce_renderer(
    renderer: Renderer, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Tell MuJoCo and Mesa, through the environment variables they read at import."""
    environment["MUJOCO_GL"] = renderer.value
    if renderer is not Renderer.NONE:
        environment["PYOPENGL_PLATFORM"] = renderer.value
    # Mesa's software renderer would start a thread per core, and lose more than it gains when
    # several workers share the cores.
    environment.setdefault("LP_NUM_THREADS", "0")


def _osmesa_problem(load: LibraryLoader) -> str | None:
    for name in ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so"):
        try:
            load(name)
        except OSError:
            continue
        return None
    return "libOSMesa.so is not installed"


def _egl_problem(load: LibraryLoader) -> str | None:
    try:
        load("libOpenGL.so.0")
        egl = load("libEGL.so.1")
    except OSError as error:
        return str(error)
    return None if _initialises(egl) else "libEGL.so.1 is there, but no driver offers a device"


def _initialises(egl: ctypes.CDLL) -> bool:
    """Whether any EGL device can be opened, which MuJoCo is going to do the same way."""
    address = egl.eglGetProcAddress
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    pointers = [address(b"eglQueryDevicesEXT"), address(b"eglGetPlatformDisplayEXT")]
    if None in pointers:
        return False
    handle = ctypes.c_void_p
    query = ctypes.CFUNCTYPE(
        ctypes.c_uint, ctypes.c_int, ctypes.POINTER(handle), ctypes.POINTER(ctypes.c_int)
    )(pointers[0])
    display_of = ctypes.CFUNCTYPE(handle, ctypes.c_uint, handle, handle)(pointers[1])
    egl.eglInitialize.argtypes = [handle, handle, handle]
    egl.eglInitialize.restype = ctypes.c_uint
    devices, count = (handle * _MAX_DEVICES)(), ctypes.c_int(0)
    if not query(_MAX_DEVICES, devices, ctypes.byref(count)):
        return False
    displays = (display_of(_PLATFORM_DEVICE, device, None) for device in devices[: count.value])
    return any(display and egl.eglInitialize(display, None, None) for display in displays)


if __name__ == "__main__":  # of any Python, before anything is installed
    try:
        find_renderer(Renderer.AUTO)
    except GraphicsError as error:
        sys.exit(str(error))
