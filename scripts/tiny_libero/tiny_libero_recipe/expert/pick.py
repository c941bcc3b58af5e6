"""Pick an object up and put it down somewhere: the phases as one pure function of the scene.

There is no memory. What to do follows from where the object is relative to the fingers, how far
they are apart and how far there is to go, so any scene, however it came about, has its action.
Heights are funnels: the larger the sideways error, the higher the hand must be.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from deft_libero.simulator.scene import Pose, Scene, Vector
from tiny_libero_recipe.expert.geometry import TIP, Points, in_frame, pinch, tallest_on_way
from tiny_libero_recipe.expert.grasps import Grasp, GraspFinder
from tiny_libero_recipe.expert.motion import UP, Aim, downward, tipped, yaw_error

_OPEN_ENOUGH = 0.066  # fingers at least this far apart before the hand comes down
_CLEARANCE = 0.05  # between what is lowest and what is passed over
_SIDE_CLEARANCE = 0.07
_HOVER = 0.06  # above the grasp while turning and centring
_UPRIGHT = 0.85  # cosine of the tilt from which a hand counts as pointing down
_FINGER_ROOM = (0.060, 0.030, 0.045)
_LEAN = 0.18  # tips the hand towards where it goes, at most


class Phase(Enum):
    """What the expert is doing, for the reader of a demonstration."""

    APPROACH = "approach"
    DESCEND = "descend"
    CLOSE = "close"
    LIFT = "lift"
    CARRY = "carry"
    LOWER = "lower"
    RELEASE = "release"
    RETREAT = "retreat"
    PULL = "pull"
    PUSH = "push"
    TURN = "turn"
    DONE = "done"


@dataclass(frozen=True, eq=False)
class Intent:
    """Where a skill wants the hand in a scene, and why."""

    aim: Aim
    phase: Phase
    object_position: Vector  # what is being handled
    goal_position: Vector  # where that should end up


@dataclass(frozen=True, eq=False)
class Place:
    """Where an object's origin should come down; `height` is for the object's lowest point."""

    position: Vector
    height: float
    tolerance: float = 0.012


@dataclass(frozen=True, eq=False)
class PickAndPlace:
    """Moves one object.

    `rest` is the height of its lowest point before it was touched, `up` the direction in its own
    frame that was upwards then.
    """

    name: str
    rest: float
    up: Vector
    finder: GraspFinder

    def intend(self, scene: Scene, place: Place, attempt: int = 0) -> Intent:
        """What to do in a scene; higher attempts try the next best grasps."""
        own = self.finder.clouds[self.name].at(scene.bodies[self.name])
        others = self.finder.others(self.name, scene)
        held = pinch(own, scene.gripper)
        if held is not None and scene.opening < held.width + 0.008:
            aim, phase = self._transport(scene, own, others, place)
        else:
            aim, phase = self._reach(scene, own, others, attempt)
        return Intent(aim, phase, scene.bodies[self.name].position, place.position)

    def _reach(self, scene: Scene, own: Points, others: Points, attempt: int) -> tuple[Aim, Phase]:
        """With nothing between the fingers: over the grasp, down, close."""
        hand = scene.gripper
        if _in_handle(hand, others):
            back = hand.position - 0.1 * hand.rotation[:, 2]
            return Aim(back, hand.rotation, closed=False), Phase.RETREAT
        grasps = self.finder.find(self.name, scene)
        grasp = grasps[min(attempt * 3, len(grasps) - 1)]
        error = float(np.linalg.norm((hand.position - grasp.position)[:2]))
        above = float(hand.position[2] - grasp.position[2])
        turn = yaw_error(grasp.closing, hand)
        closing_now = scene.opening < 0.07
        reach, height = (0.02, 0.03) if closing_now else (0.012, 0.02)
        if error < reach and -0.015 < above < height and turn < 0.2:
            rotation = downward(grasp.closing, grasp.lean)
            aim = Aim(grasp.position, rotation, closed=True, speed=0.25)
            return aim, Phase.CLOSE
        return self._approach(scene, grasp, np.concatenate([own, others]))

    def _approach(self, scene: Scene, grasp: Grasp, points: Points) -> tuple[Aim, Phase]:
        hand = scene.gripper
        offset = (grasp.position - hand.position)[:2]
        error = float(np.linalg.norm(offset))
        turn = yaw_error(grasp.closing, hand)
        way = tallest_on_way(points, hand.position, grasp.position, _SIDE_CLEARANCE)
        hover = grasp.position[2] + _HOVER
        high = max(hover, way + TIP + 0.02) if error > 0.05 else hover
        misfit = max(error - 0.006, 0.05 * (turn - 0.06), 0.0)
        if scene.opening < _OPEN_ENOUGH:
            misfit = max(misfit, 0.02)
        height = grasp.position[2] + funnel(misfit, high - grasp.position[2])
        speed = float(np.clip(1.0 - (height - hand.position[2] - 0.01) / 0.04, 0.0, 1.0))
        position = np.array([*(hand.position[:2] + speed * offset), height])
        lean = np.append(_limited(offset, _LEAN), 0.0)
        aim = Aim(position, downward(grasp.closing, grasp.lean + lean), closed=False)
        near = error < 0.03 and turn < 0.2
        return aim, Phase.DESCEND if near else Phase.APPROACH

    def _transport(
        self, scene: Scene, own: Points, others: Points, place: Place
    ) -> tuple[Aim, Phase]:
        """With the object between closed fingers: up, across, down, open."""
        pose, hand = scene.bodies[self.name], scene.gripper
        low = float(own[:, 2].min())
        offset = (place.position - pose.position)[:2]
        error = float(np.linalg.norm(offset))
        upward = pose.rotation @ self.up
        if error < place.tolerance + 0.006 and low < place.height + 0.012:
            return Aim(hand.position, hand.rotation, closed=False), Phase.RELEASE
        escape = _from_under(own, others)
        if escape is not None:
            position = hand.position + 0.06 * escape + (self.rest + 0.02 - low) * UP
            return Aim(position, tipped(hand.rotation, upward, UP), closed=True), Phase.LIFT
        way = tallest_on_way(others, pose.position, place.position, _SIDE_CLEARANCE)
        high = max(way, place.height) + _CLEARANCE
        misfit = max(error - place.tolerance * 0.7, 0.0)
        wanted = place.height + funnel(misfit, high - place.height)
        missing = wanted - low
        share = float(np.clip(1.0 - (missing - 0.01) / 0.04, 0.0, 1.0))
        position = hand.position + np.array([*(share * offset), missing])
        lifted = low - self.rest
        rise = float(np.clip(0.25 + 12.0 * lifted, 0.25, 1.0))
        lean = np.append(_limited(share * offset, _LEAN / 2), 0.0)
        level = tipped(hand.rotation, upward, UP - lean)
        aim = Aim(position, level, closed=True, rise=rise)
        if share < 0.5:
            return aim, Phase.LIFT
        return aim, Phase.CARRY if error > 0.03 else Phase.LOWER


def _from_under(own: Points, others: Points) -> Vector | None:
    """The horizontal way out from under something, None where there is nothing above."""
    middle = (own.min(axis=0) + own.max(axis=0)) / 2
    radius = float(np.ptp(own[:, :2], axis=0).max()) / 2
    offset = others - middle
    over = (np.linalg.norm(offset[:, :2], axis=1) < radius + 0.015) & (
        offset[:, 2] > float(np.ptp(own[:, 2])) / 2 + 0.005
    )
    if not over.any():
        return None
    away = -offset[over].mean(axis=0) * np.array([1.0, 1.0, 0.0])
    return np.asarray(away / max(float(np.linalg.norm(away)), 1e-6))


def _in_handle(hand: Pose, others: Points) -> bool:
    """Whether a hand that does not point down has something between or beside its fingers."""
    if float(-hand.rotation[2, 2]) > _UPRIGHT:
        return False
    local = in_frame(others, hand)
    near = (np.abs(local) < _FINGER_ROOM).all(axis=1)
    return bool(near.any())


def funnel(misfit: float, height: float) -> float:
    """How far above its end a path must be at a sideways error, up to `height`."""
    return min(4.0 * misfit, height)


def _limited(vector: NDArray[np.float64], most: float) -> NDArray[np.float64]:
    """A direction whose length is the distance at first, and `most` from 15 cm on."""
    length = float(np.linalg.norm(vector))
    return vector * (min(length / 0.15, 1.0) * most / max(length, 1e-9))
