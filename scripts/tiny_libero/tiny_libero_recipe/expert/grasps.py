"""Where to take hold of an object: candidates from its shape, ranked by the room around it.

Everything follows from the scene at hand, so the same scene always gives the same grasp.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from deft_libero.simulator.scene import Pose, Scene, Vector
from tiny_libero_recipe.expert.geometry import TIP, Cloud, Points, hits_around, hits_hand, in_frame
from tiny_libero_recipe.expert.motion import downward

MAX_WIDTH = 0.070
_BELOW_TOP = 0.035  # the palm is 4.5 cm above the grip site and must not touch the top
_ABOVE_ORIGIN = 0.002
_FLOOR_GAP = TIP - 0.001
_NUM_YAWS = 18
_NUM_RIM = 16
_OBSTRUCTION_WEIGHT = 0.05
_EASY_REACH = 0.73
_STRETCH_WEIGHT = 30.0
_TURN_WEIGHT = 0.5
_OFF_CENTRE_WEIGHT = 8.0
_RIM_TILT = 0.45  # the palm outwards, where there is no room above the vessel
_TILT_WEIGHT = 0.6

# Vessels too wide for the gripper: height of the rim, radius of its wall, depth of the grasp.
RIMS = {
    "akita_black_bowl": (0.0515, 0.0485, 0.020),
    "porcelain_mug": (0.1085, 0.0455, 0.026),
    "white_yellow_mug": (0.103, 0.0485, 0.026),
    "red_coffee_mug": (0.131, 0.0435, 0.026),
}
# Things with a handle to take: where it is, and the direction across it.
HANDLES = {"moka_pot": (np.array([0.0, 0.080, 0.045]), np.array([1.0, 0.0, 0.0]))}


@dataclass(frozen=True, eq=False)
class Grasp:
    """Where the grip site goes and the horizontal direction the fingers close along.

    `lean` tips the hand, see `motion.downward`.
    """

    position: Vector
    closing: Vector
    cost: float
    lean: Vector = field(default_factory=lambda: np.zeros(3))


def category(name: str) -> str:
    """`akita_black_bowl_2` is an akita_black_bowl."""
    return re.sub(r"_\d+$", "", name)


@dataclass(frozen=True, eq=False)
class GraspFinder:
    """Grasps of the objects in a scene; remembers answers, which are a function of the poses."""

    clouds: Mapping[str, Cloud]
    _memo: dict[bytes, list[Grasp]] = field(default_factory=dict)

    def find(self, name: str, scene: Scene) -> list[Grasp]:
        """Ways to take an object where it is now, best first."""
        pose = scene.bodies[name]
        key = _signature(name, scene)
        if key not in self._memo:
            own = self.clouds[name].at(pose) - pose.position
            others = self.others(name, scene) - pose.position
            self._memo[key] = _ranked(name, pose.rotation, own, others)
        found = []
        for grasp in self._memo[key]:
            position = grasp.position + pose.position
            cost = grasp.cost + _stretch(position - scene.base)
            found.append(replace(grasp, position=position, cost=cost))
        return sorted(found, key=lambda grasp: grasp.cost)

    def others(self, name: str, scene: Scene) -> Points:
        """Sample points of everything but one object."""
        clouds = [
            cloud.at(scene.bodies[other]) for other, cloud in self.clouds.items() if other != name
        ]
        return np.concatenate(clouds) if clouds else np.zeros((0, 3))


def _stretch(from_base: Vector) -> float:
    """The arm is weak where its elbow is straight, so far grasps cost more."""
    return _STRETCH_WEIGHT * max(float(np.linalg.norm(from_base[:2])) - _EASY_REACH, 0.0)


def _signature(name: str, scene: Scene) -> bytes:
    """Poses to 4 mm and 0.05, so that trembling does not count as change."""
    numbers = [scene.bodies[name].rotation.ravel() / 0.05]
    here = scene.bodies[name].position
    for pose in scene.bodies.values():
        numbers += [(pose.position - here) / 0.004, pose.rotation[:, 0] / 0.05]
    return name.encode() + np.round(np.concatenate(numbers)).astype(np.int32).tobytes()


def _ranked(name: str, rotation: Points, own: Points, others: Points) -> list[Grasp]:
    near = others[np.linalg.norm(others, axis=1) < 0.25]
    kind = category(name)
    if kind in RIMS:
        candidates = _rim(*RIMS[kind])
    elif kind in HANDLES:
        at, across = HANDLES[kind]
        candidates = iter([Grasp(rotation @ at, rotation @ across, 0.0)])
    else:
        candidates = _top(own)
    grasps = []
    for grasp in candidates:
        hand = Pose(grasp.position, downward(grasp.closing, grasp.lean))
        blocked = hits_hand(in_frame(near, hand)).sum() + hits_around(in_frame(own, hand)).sum()
        grasps.append(replace(grasp, cost=grasp.cost + _OBSTRUCTION_WEIGHT * float(blocked)))
    return sorted(grasps, key=lambda grasp: grasp.cost)


def _top(own: Points) -> Iterator[Grasp]:
    """From above, across any direction narrow enough, at the middle or beside it.

    A thing that has fallen over may be too wide everywhere; its narrowest direction is then the
    best there is to try, so that every scene has a grasp.
    """
    low, top = float(own[:, 2].min()), float(own[:, 2].max())
    height = max(top - _BELOW_TOP, _ABOVE_ORIGIN, low + _FLOOR_GAP)
    slab = own[np.abs(own[:, 2] - height) < 0.014]
    slab = slab if len(slab) else own
    middle = (slab[:, :2].min(axis=0) + slab[:, :2].max(axis=0)) / 2
    yaws = np.pi * np.arange(_NUM_YAWS) / _NUM_YAWS
    along = np.stack([np.cos(yaws), np.sin(yaws)], axis=1)  # [yaw, xy]
    closing = np.stack([-np.sin(yaws), np.cos(yaws)], axis=1)
    reach = slab[:, :2] - middle
    widths, lengths = np.ptp(reach @ closing.T, axis=0), np.ptp(reach @ along.T, axis=0)
    for number in np.flatnonzero(widths <= max(MAX_WIDTH, float(widths.min()))):
        turn = abs((yaws[number] + np.pi / 2) % np.pi - np.pi / 2)
        for share in (0.0, 0.3, -0.3, 0.55, -0.55):
            shift = share * lengths[number] / 2
            at = np.array([*(middle + shift * along[number]), height])
            cost = _TURN_WEIGHT * turn + _OFF_CENTRE_WEIGHT * abs(shift)
            across = np.append(closing[number], 0.0)
            yield Grasp(at, across, 30.0 * float(widths[number]) + cost)


def _rim(rim: float, radius: float, depth: float) -> Iterator[Grasp]:
    """Astride the wall of an upright vessel, in any direction."""
    for number in range(_NUM_RIM):
        angle = 2 * np.pi * number / _NUM_RIM
        outward = np.array([np.cos(angle), np.sin(angle), 0.0])
        at = radius * outward + np.array([0.0, 0.0, rim - depth])
        turn = abs((np.arctan2(-outward[0], outward[1]) + np.pi / 2) % np.pi - np.pi / 2)
        for tilt in (0.0, _RIM_TILT):
            cost = _TURN_WEIGHT * turn + _TILT_WEIGHT * tilt
            yield Grasp(at, outward, cost, -tilt * outward)
