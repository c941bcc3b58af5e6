"""MuJoCo's drawing of one scene into one buffer off the screen, in the steps it consists of.

Is handed the MuJoCo module; imports it nowhere.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from deft_client.types import Image

_OPAQUE = 0.995  # the alpha from which MuJoCo draws a thing as opaque


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
