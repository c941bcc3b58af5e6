"""The mistakes that a page measures are the ones that it names."""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest

from deft_core.peers.conventions import to_robosuite
from deft_core.types import ActionChunk, ActOptions, Observation
from tests.repository import ROOT

ACTIONS = np.array([[0.2, -0.1, 0.3, 0.05, -0.02, 0.01, 1.0]])
IMAGE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
WRIST = np.full((40, 60, 3), 7, np.uint8)


class Server:
    """Answers every frame alike, and keeps what it saw."""

    seen: Observation

    def __init__(self, url: str) -> None:
        self.url = url

    def act(self, observation: Observation, options: ActOptions) -> ActionChunk:
        Server.seen = observation
        return ActionChunk(ACTIONS.copy())

    def reset(self, session_id: str) -> None:
        """Nothing is remembered."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def mistakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "examples")
    module = import_module("silent_costs")
    monkeypatch.setattr(module, "PolicyClient", Server)
    yield module
    del sys.modules["silent_costs"]


def played(mistake: Callable[..., object]) -> tuple[Observation, np.ndarray]:
    client = mistake(None)
    client.start("episode")  # type: ignore[attr-defined]
    shown = Observation(IMAGE, "pick up the butter and place it in the basket", {"wrist": WRIST})
    chunk = client.act(shown)  # type: ignore[attr-defined]
    client.close()  # type: ignore[attr-defined]
    return Server.seen, chunk.actions


def test_without_a_mistake_nothing_is_changed(mistakes: ModuleType) -> None:
    seen, actions = played(mistakes.none)
    assert np.array_equal(seen.image, IMAGE)
    assert np.array_equal(actions, to_robosuite(ACTIONS))


def test_mistakes_before_the_policy(mistakes: ModuleType) -> None:
    assert np.array_equal(played(mistakes.upside_down)[0].image, IMAGE[::-1, ::-1])
    assert np.array_equal(played(mistakes.bgr)[0].image, IMAGE[:, :, ::-1])
    assert np.array_equal(played(mistakes.wrist_first)[0].image, WRIST)
    cropped = played(mistakes.cropped)[0].image
    assert cropped.shape == IMAGE.shape
    assert not np.array_equal(cropped, IMAGE)
    said = played(mistakes.other_words)[0].instruction
    assert said == "grab the butter and put it into the basket"


def test_mistakes_behind_the_policy(mistakes: ModuleType) -> None:
    right = to_robosuite(ACTIONS)
    assert np.allclose(played(mistakes.metres)[1][:, :6], 0.05 * right[:, :6])
    assert played(mistakes.metres)[1][0, 6] == right[0, 6]
    opposite = played(mistakes.gripper_sign)[1]
    assert opposite[0, 6] == -right[0, 6]
    assert np.array_equal(opposite[:, :6], right[:, :6])
    low, high = mistakes.OBJECT
    other_low, other_high = mistakes.SPATIAL
    share = (played(mistakes.another_key)[1][:, :6] - other_low) / (other_high - other_low)
    assert np.allclose(low + share * (high - low), ACTIONS[:, :6])
