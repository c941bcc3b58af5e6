"""Shapes as clouds of points, and the questions the expert asks of them. Pure functions.

Lengths of the Panda hand are measured from the grip site, along its axes: x is where the fingers
close, y across, z where they point.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deft_libero.simulator.scene import Box, Pose, Scene, Vector

Points = NDArray[np.float64]  # [point, 3]

SPACING = 0.010  # metres between sample points of a box, at most
PAD_ACROSS, PAD_ALONG = 0.011, 0.012  # half sizes of what the finger pads touch
TIP = 0.0115  # the finger tips reach this far beyond the grip site
PALM_ABOVE = 0.042  # the palm begins this far behind the grip site
PALM_HALF = (0.105, 0.036)
FINGER_HALF = (0.056, 0.013)
MAX_OPENING = 0.078
BETWEEN = 0.038  # open fingers leave this half width free


@dataclass(frozen=True, eq=False)
class Cloud:
    """Sample points of a body's collision boxes, in the body's own frame."""

    points: Points

    def at(self, pose: Pose) -> Points:
        """The points in the world."""
        return self.points @ pose.rotation.T + pose.position


def build_clouds(scene: Scene, boxes: Mapping[str, Sequence[Box]]) -> dict[str, Cloud]:
    """A cloud for every body, from boxes as they lie in `scene`."""
    clouds = {}
    for name, pose in scene.bodies.items():
        points = [_box_points(box) for box in boxes.get(name, ())] or [np.zeros((0, 3))]
        clouds[name] = Cloud((np.concatenate(points) - pose.position) @ pose.rotation)
    return clouds


def _box_points(box: Box) -> Points:
    """Points on the surface of a box, and on the middle plane of a thin one."""
    axes = [
        np.linspace(-half, half, 2 + int(2 * half / SPACING)) if half > 0.002 else np.zeros(1)
        for half in box.half_size
    ]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)
    on_surface = (np.abs(grid) > box.half_size - 1e-9) | (box.half_size <= 0.002)
    grid = grid[on_surface.any(axis=1)]
    return np.asarray(grid @ box.pose.rotation.T + box.pose.position)


def in_frame(points: Points, pose: Pose) -> Points:
    """World points in the frame of a pose."""
    return np.asarray((points - pose.position) @ pose.rotation)


@dataclass(frozen=True)
class Pinch:
    """What of an object lies between the finger pads, along the closing axis."""

    low: float
    high: float

    @property
    def width(self) -> float:
        """How far apart the pads are when they touch it on both sides."""
        return self.high - self.low


def pinch(points: Points, gripper: Pose, reach: float = MAX_OPENING) -> Pinch | None:
    """The part of an object between the pads, or None where there is nothing."""
    local = in_frame(points, gripper)
    between = (
        (np.abs(local[:, 0]) < reach / 2)
        & (np.abs(local[:, 1]) < PAD_ACROSS)
        & (np.abs(local[:, 2]) < PAD_ALONG)
    )
    if not between.any():
        return None
    along = local[between, 0]
    return Pinch(float(along.min()), float(along.max()))


def hits_hand(local: Points) -> NDArray[np.bool_]:
    """Which points, given in its frame, the open hand would run into."""
    across, depth = np.abs(local[:, :2]), local[:, 2]
    palm = (across < PALM_HALF).all(axis=1) & (depth < -PALM_ABOVE) & (depth > -0.2)
    fingers = (across < FINGER_HALF).all(axis=1) & (depth < TIP) & (depth > -PALM_ABOVE)
    return palm | fingers


def hits_around(local: Points) -> NDArray[np.bool_]:
    """`hits_hand` for the object itself, which may be between the open fingers."""
    between = (np.abs(local[:, 0]) < BETWEEN) & (local[:, 2] > -PALM_ABOVE)
    return hits_hand(local) & ~between


def tallest_on_way(points: Points, start: Vector, end: Vector, clearance: float) -> float:
    """The greatest height within `clearance` of the straight way; minus infinity if free."""
    way = end[:2] - start[:2]
    length = float(np.linalg.norm(way))
    direction = way / length if length > 1e-6 else np.zeros(2)
    offset = points[:, :2] - start[:2]
    along = np.clip(offset @ direction, 0.0, length)
    away = np.linalg.norm(offset - along[:, None] * direction, axis=1)
    near = away < clearance
    return float(points[near, 2].max()) if near.any() else -np.inf
