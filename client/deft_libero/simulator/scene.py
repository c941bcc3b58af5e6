"""What the simulator knows and a policy may not see: the expert's view of one moment.

Positions are metres in the world frame, rotations are matrices whose columns are the body's axes
in the world. Names are LIBERO's own instance names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Pose:
    """Where something is and how it is turned."""

    position: Vector  # [3]
    rotation: Vector  # [3, 3]


@dataclass(frozen=True, eq=False)
class Box:
    """A collision box fixed to a body: half sizes along the axes of `pose`, in the world."""

    pose: Pose
    half_size: Vector  # [3]


@dataclass(frozen=True, eq=False)
class Scene:
    """The privileged state after a step: gripper, bodies, joints and regions."""

    gripper: Pose  # the grip site, between the finger tips; its z axis points along the fingers
    opening: float  # metres between the finger pads, 0 to 0.08
    bodies: Mapping[str, Pose]  # movable objects and fixtures
    joints: Mapping[str, float]  # drawers, doors and knobs by joint name
    regions: Mapping[str, Pose]  # the sites goals speak of
    base: Vector = field(default_factory=lambda: np.zeros(3))  # where the robot stands
    goals_held: tuple[bool, ...] = ()  # which of the task's goals hold now, in their order


@dataclass(frozen=True)
class Goal:
    """One predicate of the task's goal, e.g. `in(alphabet_soup_1, basket_1_contain_region)`."""

    predicate: str
    subject: str
    target: str | None = None

    def __str__(self) -> str:
        parts = (self.subject, self.target) if self.target else (self.subject,)
        return f"{self.predicate}({', '.join(parts)})"
