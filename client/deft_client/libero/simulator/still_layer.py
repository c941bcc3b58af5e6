"""Draws what stands still once, and under every later frame puts what was drawn.

Software OpenGL needs four fifths of a frame's time for things that have not moved since the frame
before. Here they are kept with their colours and depths, sample by sample, and only what moves is
drawn again: to the last bit the same pixels, which a test compares. Where that cannot be, because
something is transparent or mirrors the scene, nothing is kept.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_client.types import Image

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


@dataclass(frozen=True, eq=False)
class GraphicsContext:
    """What there is to draw, with what, and where to. OpenGL must be current in this thread."""

    mujoco: Any
    model: Any
    data: Any
    drawing: Any  # MjrContext
    scene: Any
    options: Any  # MjvOption: which groups are drawn
    area: Any  # MjrRect

    def draw(self, view: Any, options: Any) -> None:
        """Draw the scene as it is now, whole."""
        self.update(view, options)
        self.render()

    def update(self, view: Any, options: Any) -> None:
        """List what is to be drawn."""
        everything = self.mujoco.mjtCatBit.mjCAT_ALL
        self.mujoco.mjv_updateScene(
            self.model, self.data, options, None, view, everything, self.scene
        )

    def render(self) -> None:
        """Draw what is listed."""
        self.mujoco.mjr_render(self.area, self.scene, self.drawing)

    def pixels(self) -> Image:
        """What was drawn, first row at the bottom."""
        pixels: Image = np.empty((self.area.height, self.area.width, 3), dtype=np.uint8)
        self.mujoco.mjr_readPixels(pixels, None, self.area, self.drawing)
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

    def __init__(self, stage: GraphicsContext, view: Any) -> None:
        self._stage, self._view = stage, view
        self._options = stage.mujoco.MjvOption()  # its own groups of geoms and sites
        self._is_drawn = stage.options.geomgroup[stage.model.geom_group] != 0  # [geom]
        self._picture = KeptPicture(stage.drawing)
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
            self._stage.draw(self._view, self._stage.options)

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
        stage, options = self._stage, self._options
        options.geomgroup[:] = 0 if wants_still else stage.options.geomgroup
        options.sitegroup[:] = 0 if wants_still else stage.options.sitegroup
        options.geomgroup[_KEPT_GROUP] = wants_still
        groups = stage.model.geom_group.copy()
        stage.model.geom_group[self.still] = _KEPT_GROUP
        stage.update(self._view, options)
        stage.model.geom_group[:] = groups
        if not stage.is_plain():
            return False
        sky = stage.mujoco.mjtRndFlag.mjRND_SKYBOX
        stage.scene.flags[sky] = wants_still
        stage.render()
        stage.scene.flags[sky] = True
        return True

    def _appearance(self) -> NDArray[np.float32]:
        """All that decides how each thing looks, in the precision that it is drawn with."""
        model, data, camera = self._stage.model, self._stage.data, self._view.fixedcamid
        view = np.append(data.cam_xpos[camera], data.cam_xmat[camera])
        parts = (
            data.geom_xpos,
            data.geom_xmat,
            model.geom_rgba,
            model.geom_matid[:, None],
            np.tile(view, (model.ngeom, 1)),
        )
        return np.concatenate(parts, axis=1).astype(np.float32)
