"""Draws what a camera of the simulation sees, without a screen.

Is handed the MuJoCo module and a robosuite simulation; imports neither.
"""

import atexit
import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_client.libero.errors import GraphicsError
from deft_client.libero.simulator import conventions
from deft_client.libero.simulator.graphics import Renderer
from deft_client.libero.simulator.stage import GraphicsContext
from deft_client.libero.simulator.standins.model import RING_NAME
from deft_client.libero.simulator.still_layer import StillLayer
from deft_client.types import Image

CELL_METRES = 0.01
_CELL_SHARE = 0.02  # of the largest side, for large things


Indices = NDArray[np.int32]


def thinned_faces(
    vertices: NDArray[np.float32], faces: Indices, cell: float = CELL_METRES
) -> tuple[Indices, Indices]:
    """The faces [face, 3] that remain, over the same vertices, and which rows they come from."""
    cell = max(cell, _CELL_SHARE * float(np.ptp(vertices, axis=0).max()))
    cells = np.floor(vertices / cell).astype(np.int64)
    _, cluster, counts = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    cluster = cluster.reshape(-1)
    total = np.stack([np.bincount(cluster, axis) for axis in vertices.T], axis=1)
    centre = total / counts[:, None]
    distance = np.linalg.norm(vertices - centre[cluster], axis=1)
    order = np.lexsort((distance, cluster))
    nearest = order[np.searchsorted(cluster[order], np.arange(len(counts)))]
    joined = nearest[cluster][faces]
    corners = np.sort(joined, axis=1)
    whole = (corners[:, 0] != corners[:, 1]) & (corners[:, 1] != corners[:, 2])
    rows = np.flatnonzero(whole)
    _, first = np.unique(corners[rows], axis=0, return_index=True)
    rows = rows[np.sort(first)]
    return joined[rows].astype(np.int32), rows.astype(np.int32)


@dataclass(frozen=True)
class Look:
    """Who draws, and whether to leave out what costs most in software (see docs/assets.md)."""

    renderer: Renderer
    is_light: bool


class Camera:
    """The cameras of one simulation. A light look changes the model's meshes, for drawing only."""

    def __init__(self, mujoco: Any, sim: Any, size: int, look: Look) -> None:
        self._mujoco = mujoco
        self._model, self._data = sim.model._model, sim.data._data
        # A buffer larger than the picture is drawn, and cleared, for nothing.
        self._model.vis.global_.offwidth = self._model.vis.global_.offheight = size
        if look.is_light:
            self._model.vis.quality.offsamples = 0
            _thin_meshes(self._model)
        self._context = _graphics_context(look.renderer, size)
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


def _thin_meshes(model: Any) -> None:
    """Drop triangles nobody can see from the meshes that are only drawn, never collided with."""
    is_mesh = model.geom_type == 7  # mjGEOM_MESH
    colliding = set(model.geom_dataid[is_mesh & (model.geom_group == 0)])
    for mesh in set(model.geom_dataid[is_mesh]) - colliding:
        vertices = slice(
            model.mesh_vertadr[mesh], model.mesh_vertadr[mesh] + model.mesh_vertnum[mesh]
        )
        start, count = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
        if RING_NAME in model.mesh(mesh).name:  # one of ours, with nothing to spare
            continue
        faces, rows = thinned_faces(
            model.mesh_vert[vertices], model.mesh_face[start : start + count]
        )
        stop = start + len(faces)
        model.mesh_facenormal[start:stop] = model.mesh_facenormal[start : start + count][rows]
        model.mesh_face[start:stop] = faces
        model.mesh_facenum[mesh] = len(faces)
