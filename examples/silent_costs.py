"""Mistakes that cost a policy its success without an error, for `deft-client eval --local-policy`.

    PYTHONPATH=examples deft-client eval libero_object --local-policy silent_costs:bgr

Each function is a client with one mistake around a Deft server (`DEFT_URL`, or this machine's).
docs/silent_costs.md has what each of them cost.
"""

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage

from deft_client import ActionChunk, ActOptions, Observation, PolicyClient
from deft_core.peers.conventions import to_robosuite

See = Callable[[Observation], Observation]
Move = Callable[[NDArray[np.float64]], NDArray[np.float64]]
# 1st and 99th percentile of the actions of two data sets, from the files of published checkpoints.
OBJECT = (
    np.array([-0.4297, -0.8611, -0.9401, -0.2875, -0.2967, -0.2218]),
    np.array([0.8564, 1.0, 0.9618, 0.2757, 0.2666, 0.2142]),
)
SPATIAL = (
    np.array([-0.7455, -0.6616, -0.9375, -0.1071, -0.2068, -0.1843]),
    np.array([0.9375, 0.8759, 0.9321, 0.1039, 0.1768, 0.1457]),
)


class Mistaken:
    """A client that shows the server something else, or does something else with its answers."""

    def __init__(self, see: See, move: Move) -> None:
        self._client = PolicyClient(os.environ.get("DEFT_URL", "http://127.0.0.1:8000"))
        self._see, self._move = see, move
        self._options = ActOptions()

    def start(self, session_id: str) -> None:
        """Begin an episode."""
        self._options = replace(self._options, session_id=session_id)
        self._client.reset(session_id)

    def act(self, observation: Observation) -> ActionChunk:
        """Ask the server, with the mistake before or behind."""
        chunk = self._client.act(self._see(observation), self._options)
        return replace(chunk, actions=to_robosuite(self._move(chunk.actions)))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _mistake(see: See = lambda one: one, move: Move = lambda one: one) -> Callable[..., Mistaken]:
    return lambda environment: Mistaken(see, move)


def _pictured(change: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]) -> See:
    return lambda one: replace(one, image=np.ascontiguousarray(change(one.image)))


def _moved(change: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Move:
    """Change the six motions, and leave the gripper."""
    return lambda actions: np.concatenate([change(actions[:, :6]), actions[:, 6:]], axis=1)


def _under_another_key(motions: NDArray[np.float64]) -> NDArray[np.float64]:
    share = (motions - OBJECT[0]) / (OBJECT[1] - OBJECT[0])
    return SPATIAL[0] + share * (SPATIAL[1] - SPATIAL[0])


def center_crop(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Leave out a twentieth of the picture on every side, as training with random crops has it."""
    height, width = image.shape[:2]
    edge = (width // 20, height // 20, width - width // 20, height - height // 20)
    return np.asarray(PillowImage.fromarray(image).crop(edge).resize((width, height)))


none = _mistake()
upside_down = _mistake(_pictured(lambda image: image[::-1, ::-1]))
cropped = _mistake(_pictured(lambda image: center_crop(image)))  # as other policies want it
bgr = _mistake(_pictured(lambda image: image[..., ::-1]))
wrist_first = _mistake(lambda one: replace(one, image=next(iter(one.cameras.values()), one.image)))
another_key = _mistake(move=_moved(_under_another_key))
metres = _mistake(move=_moved(lambda motions: motions * 0.05))  # a full command moves 5 cm
gripper_sign = _mistake(
    move=lambda actions: np.concatenate([actions[:, :6], 1 - actions[:, 6:]], axis=1)
)
other_words = _mistake(
    lambda one: replace(
        one,
        instruction=one.instruction.replace("pick up", "grab").replace(
            "place it in", "put it into"
        ),
    )
)
