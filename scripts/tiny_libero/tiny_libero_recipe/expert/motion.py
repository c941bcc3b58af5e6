"""From where the gripper is and where it should be to one action. Pure functions.

The robot's controller moves about a quarter of what an action asks for in one step. The hand goes
at the pace of its episode, slows down smoothly near its aim and strays a little on the way there,
less and less: what a person's demonstrations look like, and what makes labels fill their bins.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from deft_libero.simulator.conventions import CLOSE, OPEN
from deft_libero.simulator.scene import Pose, Scene, Vector

_MOTIONS = 6


@dataclass(frozen=True)
class NoiseSettings:
    """How much to disturb, in action units (1.0 is the most an action can ask for)."""

    sigma: float = 0.2  # largest standard deviation of the jitter
    push_chance: float = 0.02  # of a push beginning, per step
    push_size: float = 0.8
    push_steps: int = 6  # longest
    slip_chance: float = 0.002  # of the gripper doing the opposite for a moment, per step
    slip_steps: int = 3  # longest


class Disturbance:
    """The noise of one episode; the same generator gives the same noise."""

    def __init__(self, settings: NoiseSettings, generator: np.random.Generator) -> None:
        self._settings, self._generator = settings, generator
        self.sigma = float(settings.sigma * generator.random())
        self._push: NDArray[np.float64] = np.zeros(_MOTIONS)
        self._push_left = self._slip_left = 0

    def disturb(self, action: NDArray[np.float64]) -> NDArray[np.float64]:
        """What to execute instead of a clean action of 7 robosuite values."""
        self._start()
        noisy = action.copy()
        noisy[:_MOTIONS] += self.sigma * self._generator.standard_normal(_MOTIONS)
        if self._push_left:
            self._push_left -= 1
            noisy[:_MOTIONS] += self._push
        if self._slip_left:
            self._slip_left -= 1
            noisy[-1] = OPEN if action[-1] == CLOSE else CLOSE
        return np.clip(noisy, -1.0, 1.0)

    def _start(self) -> None:
        settings, generator = self._settings, self._generator
        if not self._push_left and generator.random() < settings.push_chance:
            self._push_left = int(generator.integers(2, settings.push_steps + 1))
            direction = generator.standard_normal(_MOTIONS)
            self._push = settings.push_size * direction / np.linalg.norm(direction)
        if not self._slip_left and generator.random() < settings.slip_chance:
            self._slip_left = int(generator.integers(1, settings.slip_steps + 1))


_STRAY_FROM = 0.06  # metres: nearer to its aim the hand hardly strays
_WAVE = 0.30  # metres in which a stray comes back to where it was
DOWN = np.array([0.0, 0.0, -1.0])
UP = -DOWN


@dataclass(frozen=True, eq=False)
class Aim:
    """Where the gripper should go and how it should be turned (axes as columns)."""

    position: Vector
    rotation: Vector  # [3, 3]
    closed: bool
    speed: float = 1.0  # the largest component of the translation
    rise: float | None = None  # limits upward speed alone


@dataclass(frozen=True, eq=False)
class Manner:
    """How the hand moves in one episode."""

    pace: float = 1.0  # the fastest translation, in action units
    gain: float = 20.0  # action units per metre that are left: how late it slows down
    turn_pace: float = 1.0
    turn_gain: float = 2.0  # action units per radian that are left
    stray: Vector = field(default_factory=lambda: np.zeros(3))  # metres beside the way
    tilt: Vector = field(default_factory=lambda: np.zeros(3))  # radians beside the rotation
    waves: Vector = field(default_factory=lambda: np.zeros((2, 3)))  # [stray or tilt, axis]

    @classmethod
    def draw(cls, generator: np.random.Generator) -> "Manner":
        """The manner of an episode; the same generator gives the same one."""
        return cls(
            pace=generator.uniform(0.7, 1.1),
            gain=generator.uniform(15.0, 24.0),
            turn_pace=generator.uniform(0.6, 1.0),
            turn_gain=generator.uniform(1.6, 2.6),
            stray=generator.uniform(-0.02, 0.02, 3),
            tilt=generator.uniform(-0.12, 0.12, 3),
            waves=generator.uniform(0.0, 2 * np.pi, (2, 3)),
        )

    def straight(self) -> "Manner":
        """The same manner without straying."""
        return replace(self, stray=np.zeros(3), tilt=np.zeros(3))

    def astray(self, distance: float) -> tuple[Vector, Vector]:
        """Metres and radians the hand aims beside its aim from so far away; nothing when there."""
        share = distance**2 / (distance**2 + _STRAY_FROM**2)
        angles = self.waves + 2 * np.pi * distance / _WAVE
        stray, tilt = share * np.sin(angles)
        return self.stray * stray, self.tilt * tilt


def steer(scene: Scene, aim: Aim, manner: Manner, ease: float = 1.0) -> NDArray[np.float64]:
    """The action of 7 robosuite values that moves towards the aim; `ease` slows all of it down."""
    hand = scene.gripper
    distance = float(np.linalg.norm(aim.position - hand.position))
    stray, tilt = manner.astray(distance)
    way = aim.position + stray - hand.position
    pace = ease * manner.pace
    translation = _soft(way, manner.gain, min(pace, pace * aim.speed))
    if aim.rise is not None:
        translation[2] = min(translation[2], pace * aim.rise)
    turn = turn_to(aim.rotation, hand) + tilt
    rotation = _soft(turn, manner.turn_gain, ease * manner.turn_pace)
    grip = CLOSE if aim.closed else OPEN
    return np.append(np.clip(np.concatenate([translation, rotation]), -1.0, 1.0), grip)


def _soft(vector: Vector, gain: float, most: float) -> Vector:
    """`gain` times a vector, its length bent so that it never quite reaches `most`."""
    length = float(np.linalg.norm(vector))
    return np.asarray(vector * (most * np.tanh(gain * length / most) / max(length, 1e-9)))


def turn_to(rotation: Vector, gripper: Pose) -> Vector:
    """The shorter of the two turns to a rotation: the two fingers are alike."""
    swapped = rotation * np.array([-1.0, -1.0, 1.0])
    turns = [rotation_vector(one @ gripper.rotation.T) for one in (rotation, swapped)]
    return min(turns, key=lambda turn: float(np.linalg.norm(turn)))


def pointing(axis: Vector, closing: Vector) -> Vector:
    """The rotation [3, 3] of a hand that points along an axis and closes as near to `closing`."""
    z = axis / np.linalg.norm(axis)
    x = closing - (closing @ z) * z
    x = x / np.linalg.norm(x)
    return np.stack([x, np.cross(z, x), z], axis=1)


def downward(closing: Vector, lean: Vector | None = None) -> Vector:
    """`pointing` down, tipped by the horizontal vector `lean`."""
    return pointing(DOWN if lean is None else DOWN + lean, closing)


def tipped(rotation: Vector, axis: Vector, wanted: Vector) -> Vector:
    """A rotation tipped so that a direction `axis` fixed to it comes to point along `wanted`."""
    wanted = wanted / np.linalg.norm(wanted)
    cross, cosine = np.cross(axis, wanted), float(axis @ wanted)
    skew = np.array(
        [[0.0, -cross[2], cross[1]], [cross[2], 0.0, -cross[0]], [-cross[1], cross[0], 0.0]]
    )
    step = np.eye(3) + skew + skew @ skew / max(1.0 + cosine, 0.1)
    return np.asarray(step @ rotation)


def rotation_vector(rotation: NDArray[np.float64]) -> Vector:
    """Axis times angle of a rotation matrix, for angles below pi."""
    angle = float(np.arccos(np.clip((np.trace(rotation) - 1.0) / 2.0, -1.0, 1.0)))
    axis = np.array(
        [
            rotation[2, 1] - rotation[1, 2],
            rotation[0, 2] - rotation[2, 0],
            rotation[1, 0] - rotation[0, 1],
        ]
    )
    sine = float(np.linalg.norm(axis))
    return np.zeros(3) if sine < 1e-9 else axis * (angle / sine)


def yaw_error(closing: Vector, gripper: Pose) -> float:
    """Angle between the fingers' closing axis and a direction, up to its sign, in radians."""
    flat = gripper.rotation[:2, 0]
    cosine = abs(float(flat @ closing[:2])) / max(float(np.linalg.norm(flat)), 1e-9)
    return float(np.arccos(np.clip(cosine, 0.0, 1.0)))
