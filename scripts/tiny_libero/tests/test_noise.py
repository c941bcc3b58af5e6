import numpy as np

from deft_libero.simulator.conventions import CLOSE, OPEN
from tiny_libero_recipe.expert.motion import Disturbance, NoiseSettings

ACTION = np.array([0.5, 0, 0, 0, 0, 0, CLOSE])
NONE = NoiseSettings(sigma=0.0, push_chance=0.0, slip_chance=0.0)


def disturbed(settings: NoiseSettings, steps: int, seed: int = 0) -> np.ndarray:
    disturbance = Disturbance(settings, np.random.default_rng(seed))
    return np.stack([disturbance.disturb(ACTION) for _ in range(steps)])


def test_without_noise_nothing_changes():
    assert (disturbed(NONE, 20) == ACTION).all()


def test_actions_stay_in_range_and_the_clean_one_is_untouched():
    wild = NoiseSettings(sigma=3.0, push_chance=0.5, push_size=5.0)
    assert np.abs(disturbed(wild, 100)).max() <= 1.0
    assert ACTION[0] == 0.5


def test_the_jitter_is_as_large_as_it_says():
    disturbance = Disturbance(NoiseSettings(0.2, 0.0, slip_chance=0.0), np.random.default_rng(4))
    rows = np.stack([disturbance.disturb(ACTION) for _ in range(4000)])
    assert 0.0 < disturbance.sigma < 0.2
    assert np.isclose(rows[:, 1].std(), disturbance.sigma, rtol=0.1)
    assert (rows[:, -1] == CLOSE).all(), "the gripper does not jitter"


def test_episodes_differ_in_how_calm_they_are_and_repeat_by_seed():
    sigmas = [Disturbance(NoiseSettings(), np.random.default_rng(seed)).sigma for seed in range(50)]
    assert min(sigmas) < 0.05 < 0.15 < max(sigmas)
    assert (disturbed(NoiseSettings(), 50, 7) == disturbed(NoiseSettings(), 50, 7)).all()


def test_a_push_lasts_a_few_steps_in_one_direction():
    pushes = NoiseSettings(sigma=0.0, push_chance=0.1, push_size=0.4, slip_chance=0.0)
    rows = disturbed(pushes, 300)[:, 1:6]
    pushed = np.abs(rows).sum(axis=1) > 0
    assert 0.1 < pushed.mean() < 0.6
    same = [(a == b).all() for a, b in zip(rows, rows[1:], strict=False) if a.any() and b.any()]
    assert np.mean(same) > 0.5


def test_a_slip_opens_what_should_close_for_a_moment():
    slips = NoiseSettings(sigma=0.0, push_chance=0.0, slip_chance=0.05)
    gripper = disturbed(slips, 400)[:, -1]
    assert 0.02 < (gripper == OPEN).mean() < 0.25
