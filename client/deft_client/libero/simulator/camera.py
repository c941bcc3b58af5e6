"""Draws what a camera of the simulation sees, without a screen.

Is handed the MuJoCo module and a robosuite simulation; imports neither.
"""

import atexit
import importlib
from typing import Any

from deft_client.libero.errors import GraphicsError
from deft_client.libero.simulator import conventions
from deft_client.libero.simulator.graphics import Renderer
from deft_client.libero.simulator.still_layer import GraphicsContext, StillLayer
from deft_client.types import Image


class Camera:
    """The cameras of one simulation."""

    def __init__(self, mujoco: Any, sim: Any, size: int, renderer: Renderer) -> None:
        self._mujoco = mujoco
        self._model, self._data = sim.model._model, sim.data._data
        # A buffer larger than the picture is drawn, and cleared, for nothing.
        self._model.vis.global_.offwidth = self._model.vis.global_.offheight = size
        self._context = _graphics_context(renderer, size)
        atexit.register(self.close)  # EGL ends at exit too, and complains of what is still open
        self._context.make_current()
        drawing = mujoco.MjrContext(self._model, mujoco.mjtFontScale.mjFONTSCALE_150)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, drawing)
        options = mujoco.MjvOption()
        options.geomgroup[0] = 0  # collision shapes stay invisible
        self.stage = GraphicsContext(
            mujoco=mujoco,
            model=self._model,
            data=self._data,
            drawing=drawing,
            scene=mujoco.MjvScene(self._model, maxgeom=1000),
            options=options,
            area=mujoco.MjrRect(0, 0, size, size),
        )
        self._layers: dict[str, StillLayer] | None = {} if _is_slow(drawing) else None

    def look(self, name: str) -> Image:
        """The camera's picture, turned as policies expect it."""
        mujoco, stage = self._mujoco, self.stage
        self._context.make_current()
        view = mujoco.MjvCamera()
        view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        view.fixedcamid = mujoco.mj_name2id(self._model, mujoco.mjtObj.mjOBJ_CAMERA, name)
        if self._layers is None:
            stage.draw(view, stage.options)
        else:
            if name not in self._layers:
                self._layers[name] = StillLayer(stage, view)
            self._layers[name].draw()
        return conventions.upright(stage.pixels())

    def close(self) -> None:
        """Free what OpenGL holds."""
        atexit.unregister(self.close)
        self._context.make_current()
        self.stage.drawing.free()
        self._context.free()


def _is_slow(drawing: Any) -> bool:
    """Whether OpenGL draws in software here, and several samples of each pixel."""
    from OpenGL import GL

    return drawing.offSamples > 0 and b"pipe" in GL.glGetString(GL.GL_RENDERER)


def _graphics_context(renderer: Renderer, size: int) -> Any:
    if renderer is Renderer.NONE:
        raise GraphicsError("this environment was opened without a renderer, so it has no frames")
    module = importlib.import_module(f"mujoco.{renderer.value}")
    return module.GLContext(size, size)
