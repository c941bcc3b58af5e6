"""The parts of an episode that picks something up and places it, told from its commands alone."""

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from deft_client.libero.simulator.conventions import METRES_PER_UNIT, RADIANS_PER_UNIT

GRASP_STEPS = 10  # half a second, in which the fingers close
RELEASE_STEPS = 10  # of setting down, before the fingers open


class ArmPhase(Enum):
    """What the arm is about to do."""

    APPROACH = "approach"
    GRASP = "grasp"
    TRANSPORT = "transport"
    PLACE = "place"


def phases_of(actions: NDArray[np.float64]) -> list[ArmPhase]:
    """The phase of every step, from actions [step, 7] in robosuite's units.

    The gripper is first told to close: grasp, for half a second. It is last told to open behind
    that, or the episode ends: place, from half a second before. Between them lies transport. An
    episode that never closes is approach throughout.
    """
    closes = actions[:, -1] > 0
    first = int(np.argmax(closes)) if closes.any() else len(actions)
    carried = first + GRASP_STEPS
    opens = np.flatnonzero(closes[carried:-1] & ~closes[carried + 1 :]) + carried + 1
    released = int(opens[-1]) if len(opens) else len(actions)
    placed = max(carried, released - RELEASE_STEPS)
    bounds = ((first, ArmPhase.APPROACH), (carried, ArmPhase.GRASP), (placed, ArmPhase.TRANSPORT))
    return [
        next((phase for end, phase in bounds if step < end), ArmPhase.PLACE)
        for step in range(len(actions))
    ]


def millimetres_apart(
    first: NDArray[np.float64], second: NDArray[np.float64]
) -> NDArray[np.float64]:
    """How far apart the commanded motions end, step by step."""
    apart = np.linalg.norm(first[:, :3] - second[:, :3], axis=1)
    return np.asarray(1000.0 * METRES_PER_UNIT * apart)


def degrees_apart(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far apart the commanded turns are, step by step."""
    apart = np.linalg.norm(first[:, 3:6] - second[:, 3:6], axis=1)
    return np.asarray(np.degrees(RADIANS_PER_UNIT * apart))
