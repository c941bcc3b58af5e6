"""Draws what a camera of the simulation sees, without a screen.

Is handed the MuJoCo module and a robosuite simulation; imports neither. Software OpenGL needs four
fifths of a frame's time for things that have not moved since the frame before. There they are kept
with their colours and depths, sample by sample, and only what moves is drawn again: to the last bit
the same pixels, which a test compares. Where that cannot be, because something is transparent or
mirrors the scene, nothing is kept.
"""

import atexit
import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_core.peers.conventions import upright
from deft_core.types import Image
from deft_libero.errors import GraphicsError
from deft_libero.simulator.graphics import Renderer

_OPAQUE = 0.995  # the alpha from which MuJoCo draws a thing as opaque
_STEADY_FRAMES = 5  # unmoved for so many frames, a thing counts as standing still
_KEPT_GROUP = 5  # of MuJoCo's geom groups, one that no model of robosuite's uses

_VERTEX = """
#version 400
void main() {
    vec2 corner = vec2(gl_VertexID & 1, gl_VertexID >> 1);
    gl_Position = vec4(4.0 * corner - 1.0, 0.5, 1.0);
}
"""
_FRAGMENT = """
#version 400
uniform sampler2DMS colours;
uniform sampler2DMS depths;
out vec4 colour;
void main() {
    ivec2 place = ivec2(gl_FragCoord.xy);
    colour = texelFetch(colours, place, gl_SampleID);
    gl_FragDepth = texelFetch(depths, place, gl_SampleID).r;
}
"""


class Camera:
    """The cameras of one simulation: what there is to draw, with what, and where to."""

    def __init__(self, mujoco: Any, sim: Any, size: int, renderer: Renderer) -> None:
        self.mujoco = mujoco
        self.model, self.data = sim.model._model, sim.data._data
        # A buffer larger than the picture is drawn, and cleared, for nothing.
        self.model.vis.global_.offwidth = self.model.vis.global_.offheight = size
        self._context = _graphics_context(renderer, size)
        atexit.register(self.close)  # EGL ends at exit too, and complains of what is still open
        self._context.make_current()
        self.drawing = mujoco.MjrContext(self.model, mujoco.mjtFontScale.mjFONTSCALE_150)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.drawing)
        self.options = mujoco.MjvOption()
        self.options.geomgroup[0] = 0  # collision shapes stay invisible
        self.scene = mujoco.MjvScene(self.model, maxgeom=1000)
        self._area = mujoco.MjrRect(0, 0, size, size)
        self._layers: dict[str, StillLayer] | None = {} if _is_slow(self.drawing) else None

    def look(self, name: str) -> Image:
        """The camera's picture, turned as policies expect it."""
        mujoco = self.mujoco
        self._context.make_current()
        view = mujoco.MjvCamera()
        view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        view.fixedcamid = mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_CAMERA, name)
        if self._layers is None:
            self.draw(view)
        else:
            if name not in self._layers:
                self._layers[name] = StillLayer(self, view)
            self._layers[name].draw()
        return upright(self.pixels())

    def close(self) -> None:
        """Free what OpenGL holds."""
        atexit.unregister(self.close)
        self._context.make_current()
        self.drawing.free()
        self._context.free()

    def draw(self, view: Any) -> None:
        """Draw the scene as it is now, whole."""
        self.update(view, self.options)
        self.render()

    def update(self, view: Any, options: Any) -> None:
        """List what is to be drawn."""
        everything = self.mujoco.mjtCatBit.mjCAT_ALL
        self.mujoco.mjv_updateScene(
            self.model, self.data, options, None, view, everything, self.scene
        )

    def render(self) -> None:
        """Draw what is listed."""
        self.mujoco.mjr_render(self._area, self.scene, self.drawing)

    def pixels(self) -> Image:
        """What was drawn, first row at the bottom."""
        pixels: Image = np.empty((self._area.height, self._area.width, 3), dtype=np.uint8)
        self.mujoco.mjr_readPixels(pixels, None, self._area, self.drawing)
        return pixels

    def is_plain(self) -> bool:
        """Whether no listed thing shows another one: none is transparent, a mirror or in shadow."""
        kinds = self.mujoco.mjtGeom
        mirrors = (int(kinds.mjGEOM_PLANE), int(kinds.mjGEOM_BOX))
        listed = self.scene.geoms[: self.scene.ngeom]
        return not self.model.light_castshadow.any() and all(
            not 0.0 < one.rgba[3] < _OPAQUE and not (one.reflectance > 0 and one.type in mirrors)
            for one in listed  # robosuite hides its marks by an alpha below zero
        )


def _is_slow(drawing: Any) -> bool:
    """Whether OpenGL draws in software here, and several samples of each pixel."""
    from OpenGL import GL

    return drawing.offSamples > 0 and b"pipe" in GL.glGetString(GL.GL_RENDERER)


def _graphics_context(renderer: Renderer, size: int) -> Any:
    if renderer is Renderer.NONE:
        raise GraphicsError("this environment was opened without a renderer, so it has no frames")
    module = importlib.import_module(f"mujoco.{renderer.value}")
    return module.GLContext(size, size)


class KeptPicture:
    """Colours and depths of a picture, every sample of it, in OpenGL's memory."""

    def __init__(self, drawing: Any) -> None:
        from OpenGL import GL
        from OpenGL.GL import shaders

        self._gl, self._buffer = GL, drawing.offFBO
        self._size = (drawing.offWidth, drawing.offHeight)
        self._program = shaders.compileProgram(
            shaders.compileShader(_VERTEX, GL.GL_VERTEX_SHADER),
            shaders.compileShader(_FRAGMENT, GL.GL_FRAGMENT_SHADER),
            validate=False,  # at this moment no textures are bound
        )
        self._textures = [
            self._new_texture(drawing.offSamples, kind)
            for kind in (GL.GL_RGBA8, GL.GL_DEPTH32F_STENCIL8)
        ]
        self._frame = GL.glGenFramebuffers(1)
        GL.glBindFramebuffer(GL.GL_FRAMEBUFFER, self._frame)
        places = (GL.GL_COLOR_ATTACHMENT0, GL.GL_DEPTH_STENCIL_ATTACHMENT)
        for place, texture in zip(places, self._textures, strict=True):
            GL.glFramebufferTexture2D(
                GL.GL_FRAMEBUFFER, place, GL.GL_TEXTURE_2D_MULTISAMPLE, texture, 0
            )
        GL.glBindFramebuffer(GL.GL_FRAMEBUFFER, self._buffer)

    def _new_texture(self, samples: int, kind: int) -> int:
        gl = self._gl
        texture: int = gl.glGenTextures(1)
        gl.glBindTexture(gl.GL_TEXTURE_2D_MULTISAMPLE, texture)
        gl.glTexImage2DMultisample(gl.GL_TEXTURE_2D_MULTISAMPLE, samples, kind, *self._size, True)
        gl.glBindTexture(gl.GL_TEXTURE_2D_MULTISAMPLE, 0)
        return texture

    def keep(self) -> None:
        """Take what MuJoCo's buffer shows now."""
        gl, whole = self._gl, (0, 0, *self._size)
        what = gl.GL_COLOR_BUFFER_BIT | gl.GL_DEPTH_BUFFER_BIT
        gl.glBindFramebuffer(gl.GL_READ_FRAMEBUFFER, self._buffer)
        gl.glBindFramebuffer(gl.GL_DRAW_FRAMEBUFFER, self._frame)
        gl.glBlitFramebuffer(*whole, *whole, what, gl.GL_NEAREST)
        gl.glBindFramebuffer(gl.GL_FRAMEBUFFER, self._buffer)

    def put_under(self) -> None:
        """Add what was kept to MuJoCo's buffer, wherever it is not behind what is there."""
        gl = self._gl
        gl.glUseProgram(self._program)
        for unit, texture in enumerate(self._textures):
            gl.glActiveTexture(gl.GL_TEXTURE0 + unit)
            gl.glBindTexture(gl.GL_TEXTURE_2D_MULTISAMPLE, texture)
        for unit, name in enumerate(("colours", "depths")):
            gl.glUniform1i(gl.glGetUniformLocation(self._program, name), unit)
        gl.glDisable(gl.GL_CULL_FACE)  # MuJoCo sets all else as this needs it, every time
        gl.glDrawArrays(gl.GL_TRIANGLES, 0, 3)
        gl.glUseProgram(0)
        for unit in (1, 0):
            gl.glActiveTexture(gl.GL_TEXTURE0 + unit)
            gl.glBindTexture(gl.GL_TEXTURE_2D_MULTISAMPLE, 0)


class StillLayer:
    """Draws one camera's frames in two parts: what stands still, kept, and what moves."""

    def __init__(self, camera: Camera, view: Any) -> None:
        self._camera, self._view = camera, view
        self._options = camera.mujoco.MjvOption()  # its own groups of geoms and sites
        self._is_drawn = camera.options.geomgroup[camera.model.geom_group] != 0  # [geom]
        self._picture = KeptPicture(camera.drawing)
        self._before = self._shown = self._appearance()  # [geom, number]; at the last, kept frame
        self._num_steady = np.zeros(len(self._before), dtype=np.int64)  # [geom], frames
        self.still = np.zeros(len(self._before), dtype=np.bool_)  # [geom], in the kept picture

    def draw(self) -> None:
        """Draw the scene as it is now, to the last bit as in one part."""
        now = self._appearance()
        is_same = (now == self._before).all(axis=1)
        self._num_steady = np.where(is_same, self._num_steady + 1, 0)
        self._before = now
        has_settled = (self._num_steady == _STEADY_FRAMES) & self._is_drawn & ~self.still
        if has_settled.any() or (now != self._shown)[self.still].any():
            self._keep(now)
        if self.still.any() and self._draw_part(wants_still=False):
            self._picture.put_under()
        else:
            self._camera.draw(self._view)

    def _keep(self, now: NDArray[np.float32]) -> None:
        self.still = (self._num_steady >= _STEADY_FRAMES) & self._is_drawn
        self._shown = now
        if self.still.any():
            if self._draw_part(wants_still=True):
                self._picture.keep()
            else:
                self.still[:] = False

    def _draw_part(self, wants_still: bool) -> bool:
        """Draw what stands still, or all else; false where parts are not the same as the whole."""
        camera, options = self._camera, self._options
        options.geomgroup[:] = 0 if wants_still else camera.options.geomgroup
        options.sitegroup[:] = 0 if wants_still else camera.options.sitegroup
        options.geomgroup[_KEPT_GROUP] = wants_still
        groups = camera.model.geom_group.copy()
        camera.model.geom_group[self.still] = _KEPT_GROUP
        camera.update(self._view, options)
        camera.model.geom_group[:] = groups
        if not camera.is_plain():
            return False
        sky = camera.mujoco.mjtRndFlag.mjRND_SKYBOX
        camera.scene.flags[sky] = wants_still
        camera.render()
        camera.scene.flags[sky] = True
        return True

    def _appearance(self) -> NDArray[np.float32]:
        """All that decides how each thing looks, in the precision that it is drawn with."""
        model, data, number = self._camera.model, self._camera.data, self._view.fixedcamid
        view = np.append(data.cam_xpos[number], data.cam_xmat[number])
        parts = (
            data.geom_xpos,
            data.geom_xmat,
            model.geom_rgba,
            model.geom_matid[:, None],
            np.tile(view, (model.ngeom, 1)),
        )
        return np.concatenate(parts, axis=1).astype(np.float32)
