import numpy as np

from tiny_libero_recipe.expert.grasps import MAX_WIDTH, _top


def box(half: tuple[float, float, float]) -> np.ndarray:
    axes = [np.linspace(-side, side, 9) for side in half]
    return np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 3)


def test_a_narrow_thing_is_taken_across_its_narrow_side():
    best = min(_top(box((0.02, 0.06, 0.03))), key=lambda grasp: grasp.cost)
    assert abs(best.closing[0]) > 0.95


def test_a_thing_too_wide_everywhere_still_has_a_grasp():
    """A can that lay on its side had none, and the expert raised an IndexError mid-episode."""
    wide = MAX_WIDTH * 0.75
    assert list(_top(box((wide, wide * 1.3, 0.03))))
