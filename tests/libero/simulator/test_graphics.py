import subprocess
import sys

import pytest

from deft_libero.errors import GraphicsError
from deft_libero.simulator.graphics import (
    APT_LINE_OSMESA,
    Renderer,
    announce_renderer,
    find_renderer,
)
from tests.repository import ROOT


@pytest.fixture(autouse=True)
def _no_choice_in_the_environment(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)


def loader(*present: str):
    """A stand-in for ctypes.CDLL on a machine that has only these libraries."""

    def load(name: str):
        if name not in present:
            raise OSError(f"{name}: cannot open shared object file")
        return object()

    return load


def test_without_any_library_the_error_gives_the_apt_line():
    with pytest.raises(GraphicsError, match="apt-get install -y libegl1") as caught:
        find_renderer(Renderer.AUTO, loader())
    assert "libOSMesa" in str(caught.value)
    assert "libosmesa6" in str(caught.value)


def test_osmesa_stands_in_where_there_is_no_egl():
    assert find_renderer(Renderer.AUTO, loader("libOSMesa.so.8")) is Renderer.OSMESA


def test_what_is_asked_for_by_name_is_not_replaced():
    with pytest.raises(GraphicsError, match="EGL: "):
        find_renderer(Renderer.EGL, loader("libOSMesa.so.8"))


def test_the_environment_settles_an_open_choice(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert find_renderer(Renderer.AUTO, loader("libOSMesa.so.8")) is Renderer.OSMESA
    with pytest.raises(GraphicsError, match="OSMESA"):
        find_renderer(Renderer.AUTO, loader())


def test_physics_alone_needs_no_library():
    assert find_renderer(Renderer.NONE, loader()) is Renderer.NONE


def test_mesa_is_told_not_to_start_threads_unless_somebody_else_has():
    environment = {"LP_NUM_THREADS": "2"}
    announce_renderer(Renderer.EGL, environment)
    assert environment["LP_NUM_THREADS"] == "2"
    assert environment["MUJOCO_GL"] == environment["PYOPENGL_PLATFORM"] == "egl"
    quiet: dict[str, str] = {}
    announce_renderer(Renderer.NONE, quiet)
    assert quiet == {"MUJOCO_GL": "disable", "LP_NUM_THREADS": "0"}


def test_it_can_be_asked_before_anything_is_installed():
    """As `make demo` does, with whatever Python there is."""
    asked = subprocess.run(
        [sys.executable, "-S", "-m", "deft_libero.simulator.graphics"],
        env={"PYTHONPATH": str(ROOT / "client"), "MUJOCO_GL": "osmesa", "LD_LIBRARY_PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in asked.stderr
    assert asked.returncode == 0 or APT_LINE_OSMESA in asked.stderr
