"""What the expert does to things that do not leave their place: drawers, knobs, plates, doors.

Each skill is a pure function of the scene, as in `pick`: where the hand is relative to the
handle and how far its fingers are apart decide what comes next.
"""

from dataclasses import dataclass

import numpy as np

from deft_libero.simulator.scene import Scene, Vector
from tiny_libero_recipe.expert.geometry import TIP, Points
from tiny_libero_recipe.expert.motion import UP, Aim, downward, pointing, turn_to
from tiny_libero_recipe.expert.pick import Intent, Phase, funnel

_BAR_DEPTH = 0.014  # what of a drawer is nearer to its foremost point than this is its bar
_BAR_SLACK = 0.007  # fingers no further apart than the bar is thick, and this, hold it
_PULL_LEAN = 0.3  # the palm upwards, over what stands in front
_STAND_OFF = 0.10
_KNOB_GRIP = 0.038  # height of the knob's bar above the stove's origin
_KNOB_BAR = 0.034  # fingers nearer than this hold the bar
_KNOB_LEAN = np.array([-0.2, 0.0, 0.0])  # keeps the wrist away from the robot's base
_TURN_LEAD = 0.3  # radians the hand leads the knob by
_SHUT_LEAN = 0.6
_PLATE_FLOOR = 0.004
_PRESS = 0.008  # how far below itself the pushing hand aims, so as not to ride over the rim
_INSIDE = 0.025  # where on the plate the fingers come down, from its middle
_FLAT = np.array([1.0, 1.0, 0.0])


@dataclass(frozen=True, eq=False)
class Handle:
    """The bar in front of a drawer: its middle, how thick it is, and where its front looks."""

    middle: Vector
    thickness: float
    front: Vector

    @classmethod
    def of_drawer(cls, points: Points, front: Vector) -> "Handle":
        """Found as what of a drawer's points is foremost."""
        out = points @ front
        bar = points[out > out.max() - _BAR_DEPTH]
        low, high = bar.min(axis=0), bar.max(axis=0)
        return cls((low + high) / 2, float(high[2] - low[2]), front)


@dataclass(frozen=True, eq=False)
class PullDrawer:
    """Opens a drawer: pinches its bar from the front, one finger above, one below, and pulls."""

    handle: Handle

    def intend(self, scene: Scene) -> Intent:
        """What to do in a scene."""
        hand, bar, front = scene.gripper, self.handle.middle, self.handle.front
        rotation = pointing(-front - _PULL_LEAN * UP, UP)
        offset = hand.position - bar
        out = float(offset @ front)
        aside = float(np.linalg.norm(offset - out * front))
        turn = float(np.linalg.norm(turn_to(rotation, hand)))
        near = aside < 0.014 and abs(out) < 0.016 and turn < 0.4
        if near and scene.opening < self.handle.thickness + _BAR_SLACK:
            aim = Aim(bar + (out + 0.1) * front, rotation, closed=True, speed=0.25)
            return _intent(aim, Phase.PULL, bar)
        if aside < 0.010 and abs(out) < 0.012 and turn < 0.3:
            return _intent(Aim(bar, rotation, closed=True), Phase.CLOSE, bar)
        misfit = max(aside - 0.005, 0.08 * (turn - 0.12), 0.0)
        if scene.opening < 0.05:
            misfit = max(misfit, 0.03)
        wanted = funnel(misfit, _STAND_OFF)
        position = bar + wanted * front
        if out < wanted - 0.02:  # first away from the cabinet, then sideways
            position = hand.position + (wanted - out) * front
        phase = Phase.DESCEND if misfit < 0.02 else Phase.APPROACH
        return _intent(Aim(position, rotation, closed=False), phase, bar)


@dataclass(frozen=True, eq=False)
class TurnKnob:
    """Turns a stove on: takes the bar on its knob from above and turns the hand."""

    stove: str
    joint: str

    def intend(self, scene: Scene) -> Intent:
        """What to do in a scene."""
        hand, stove = scene.gripper, scene.bodies[self.stove]
        angle = scene.joints[self.joint]
        # At angle 0 the bar lies along the stove's x axis; the fingers close across it.
        across = stove.rotation @ np.array([-np.sin(angle), np.cos(angle), 0.0])
        knob = stove.position + _KNOB_GRIP * UP
        rotation = downward(across, _KNOB_LEAN)
        error = float(np.linalg.norm((hand.position - knob)[:2]))
        above = float(hand.position[2] - knob[2])
        turn = float(np.linalg.norm(turn_to(rotation, hand)))
        level = -0.012 < above < 0.018
        if level and error < 0.025 and scene.opening < _KNOB_BAR and turn < 0.9:
            further = _about_up(_TURN_LEAD) @ hand.rotation
            return _intent(Aim(knob, further, closed=True), Phase.TURN, knob)
        if level and error < 0.015 and turn < 0.25:
            return _intent(Aim(knob, rotation, closed=True, speed=0.3), Phase.CLOSE, knob)
        misfit = max(error - 0.006, 0.05 * (turn - 0.1), 0.0)
        if scene.opening < 0.05:
            misfit = max(misfit, 0.02)
        return _descend(scene, knob, rotation, funnel(misfit, 0.06))


@dataclass(frozen=True, eq=False)
class PushPlate:
    """Pushes a plate along the table, closed fingers against its rim from the inside.

    From the outside there is often no room behind it.
    """

    plate: str
    region: str
    table: float  # height of what the plate lies on

    def intend(self, scene: Scene) -> Intent:
        """What to do in a scene."""
        hand, plate = scene.gripper, scene.bodies[self.plate].position
        way = (scene.regions[self.region].position - plate) * _FLAT
        left = float(np.linalg.norm(way))
        ahead = way / left if left > 1e-3 else np.array([1.0, 0.0, 0.0])
        rotation = downward(np.cross(UP, ahead))
        start = plate + _INSIDE * ahead
        start[2] = self.table + TIP + _PLATE_FLOOR - 0.003
        offset = (hand.position - plate) * _FLAT
        along = float(offset @ ahead)
        aside = offset - along * ahead
        inside = float(np.linalg.norm(aside)) < 0.02 and 0.0 < along < 0.055
        if hand.position[2] < start[2] + 0.004 and inside:
            step = min(left + 0.02, 0.05) * ahead - 0.7 * aside
            position = hand.position + step - _PRESS * UP
            return _intent(Aim(position, rotation, closed=True), Phase.PUSH, plate)
        error = float(np.linalg.norm((hand.position - start)[:2]))
        turn = float(np.linalg.norm(turn_to(rotation, hand)))
        misfit = max(error - 0.01, 0.05 * (turn - 0.2), 0.0)
        if scene.opening > 0.02:
            misfit = max(misfit, 0.015)
        return _descend(scene, start, rotation, funnel(misfit, 0.09), closed=True)


@dataclass(frozen=True, eq=False)
class PushShut:
    """Shuts a drawer: pushes its bar with closed fingers, the palm leaning outwards."""

    handle: Handle

    def intend(self, scene: Scene) -> Intent:
        """What to do in a scene."""
        hand, bar, front = scene.gripper, self.handle.middle, self.handle.front
        rotation = downward(np.cross(UP, front), -_SHUT_LEAN * front)
        offset = hand.position - bar
        out = float(offset @ front)
        aside = float(np.linalg.norm((offset - out * front)[:2]))
        if aside < 0.04 and 0.0 < out < 0.08 and offset[2] < 0.02 and scene.opening < 0.02:
            position = hand.position - 0.04 * front
            position[2] = bar[2] + 0.004
            return _intent(Aim(position, rotation, closed=True), Phase.PUSH, bar)
        start = bar + 0.05 * front + 0.004 * UP
        error = float(np.linalg.norm((hand.position - start)[:2]))
        turn = float(np.linalg.norm(turn_to(rotation, hand)))
        misfit = max(error - 0.012, 0.05 * (turn - 0.2), 0.0)
        if scene.opening > 0.02:
            misfit = max(misfit, 0.015)
        return _descend(scene, start, rotation, funnel(misfit, 0.16), closed=True)


def _descend(
    scene: Scene, goal: Vector, rotation: Vector, height: float, closed: bool = False
) -> Intent:
    """Above a point, as high as the funnel says, sideways only when high enough."""
    hand = scene.gripper.position
    above = goal[2] + height
    share = float(np.clip(1.0 - (above - hand[2] - 0.01) / 0.04, 0.0, 1.0))
    position = np.array([*(hand[:2] + share * (goal - hand)[:2]), above])
    phase = Phase.DESCEND if height < 0.05 else Phase.APPROACH
    return _intent(Aim(position, rotation, closed), phase, goal)


def _intent(aim: Aim, phase: Phase, handled: Vector) -> Intent:
    return Intent(aim, phase, handled, aim.position)


def _about_up(angle: float) -> Vector:
    sine, cosine = np.sin(angle), np.cos(angle)
    return np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])
