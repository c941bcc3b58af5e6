"""LIBERO's tasks behave as Gymnasium's own checker and its users expect."""

import warnings

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="pip install 'deft-client[libero]'")
from gymnasium.utils.env_checker import check_env

from deft_libero.simulator.conventions import WAIT_STEPS, wait_action
from deft_libero.simulator.gym import LiberoGym
from deft_libero.simulator.suites import find_suite
from tests.standins.environments import CountingEnvironment


def test_gymnasiums_own_checker_has_no_complaint():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(render|spec|nondeterministic).*")
        check_env(LiberoGym(CountingEnvironment(), size=8), skip_render_check=True)


def test_the_goal_ends_an_episode_with_a_reward_of_one():
    gym = LiberoGym(CountingEnvironment(done_at=WAIT_STEPS + 2), size=8)
    seen, info = gym.reset(options={"trial": 7})
    assert gym.environment.trials == [7]
    assert info["instruction"] == "pick up the soup"
    assert seen["image"][0, 0, 0] == WAIT_STEPS
    assert gym.step(np.zeros(7))[1:4] == (0.0, False, False)
    assert gym.step(np.zeros(7))[1:4] == (1.0, True, False)


def test_an_episode_is_truncated_at_the_suites_limit():
    gym = LiberoGym(CountingEnvironment(), size=8)
    gym.reset()
    ended = [gym.step(wait_action())[3] for _ in range(find_suite("libero_object").step_limit)]
    assert ended.index(True) == len(ended) - 1


def test_trials_come_in_turn():
    gym = LiberoGym(CountingEnvironment(), size=8)
    for options in (None, None, {"trial": 49}, None):
        gym.reset(options=options)
    assert gym.environment.trials == [0, 1, 49, 0]
