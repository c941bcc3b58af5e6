import numpy as np

from deft_client.libero.simulator.init_states import Footprint, draw_shifts, footprint
from deft_client.libero.simulator.scene import Box, Pose


def square(x: float, y: float, half: float = 0.03, movable: bool = True) -> Footprint:
    middle = np.array([x, y])
    return Footprint(middle - half, middle + half, movable)


def test_things_move_by_no_more_than_asked_and_stay_apart():
    prints = {f"thing{number}": square(0.12 * number, 0.0) for number in range(5)}
    for seed in range(50):
        shifts = draw_shifts(prints, 0.04, np.random.default_rng(seed))
        assert all(np.abs(shift).max() <= 0.04 for shift in shifts.values())
        moved = [one.shifted(shifts[name]) for name, one in prints.items()]
        assert not any(a.touches(b, 0.0) for a in moved for b in moved if a is not b)


def test_the_same_generator_gives_the_same_shifts():
    prints = {"a": square(0, 0), "b": square(0.2, 0)}
    once, again = (draw_shifts(prints, 0.05, np.random.default_rng(3)) for _ in range(2))
    assert all((once[name] == again[name]).all() for name in prints)


def test_what_stands_on_something_moves_with_it():
    prints = {"ramekin": square(0, 0), "bowl": square(0.005, 0), "plate": square(0.4, 0)}
    shifts = draw_shifts(prints, 0.03, np.random.default_rng(0))
    np.testing.assert_array_equal(shifts["ramekin"], shifts["bowl"])
    assert (shifts["plate"] != shifts["bowl"]).any()


def test_what_rests_in_a_fixture_stays_and_fixtures_never_move():
    prints = {"bowl": square(0, 0), "cabinet": square(0, 0, 0.2, movable=False)}
    shifts = draw_shifts(prints, 0.03, np.random.default_rng(0))
    assert list(shifts) == ["bowl"]
    assert not shifts["bowl"].any()


def test_a_crowded_thing_stays_where_it_is():
    prints = {"a": square(0, 0), "wall": square(0.063, 0, 0.03, movable=False)}
    prints |= {f"wall{side}": square(-0.063, 0, 0.03, movable=False) for side in "b"}
    shifts = draw_shifts(prints, 0.004, np.random.default_rng(0))
    assert not shifts["a"].any()


def test_a_footprint_covers_turned_boxes():
    turn = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    box = Box(Pose(np.array([1.0, 2.0, 3.0]), turn), np.array([0.1, 0.2, 0.3]))
    found = footprint([box], movable=True)
    np.testing.assert_allclose([*found.low, *found.high], [0.8, 1.9, 1.2, 2.1])
