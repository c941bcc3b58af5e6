"""Initial states come as pickles from elsewhere: only arrays of floats may get in."""

import os
import pickle
import zipfile

import numpy as np
import pytest

from deft_libero.errors import AssetsError
from deft_libero.simulator.init_states import Footprint, draw_shifts, footprint, load_initial_states
from deft_libero.simulator.scene import Box, Pose

TABLE = np.linspace(0.0, 1.0, 12).reshape(3, 4)


class Intruder:
    def __reduce__(self):
        return os.mkdir, ("intruder_was_here",)


def packed(path, content: object, name: str = "archive/data.pkl"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, pickle.dumps(content, protocol=2))
    return path


def test_a_table_of_floats_is_read_as_it_was_written(tmp_path):
    states = load_initial_states(packed(tmp_path / "good", TABLE))
    np.testing.assert_array_equal(states, TABLE)


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssetsError, match="only arrays"):
        load_initial_states(packed(tmp_path / "bad", [TABLE, Intruder()]))
    assert not (tmp_path / "intruder_was_here").exists()


@pytest.mark.parametrize(
    "content",
    [
        np.array([[object()]], dtype=object),
        TABLE.astype(np.float32),
        TABLE.ravel(),
        [1.0, 2.0],
        np.array([[1.0, np.nan]]),
    ],
    ids=["objects", "float32", "one dimension", "a list", "not a number"],
)
def test_anything_but_one_finite_float64_table_is_refused(tmp_path, content):
    with pytest.raises(AssetsError, match=str(tmp_path)):
        load_initial_states(packed(tmp_path / "odd", content))


def test_files_that_are_no_archive_or_not_there_are_named(tmp_path):
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(AssetsError, match="zip"):
        load_initial_states(tmp_path / "text")
    with pytest.raises(AssetsError, match="is LIBERO complete"):
        load_initial_states(tmp_path / "nothing")
    with pytest.raises(AssetsError, match=r"data\.pkl"):
        load_initial_states(packed(tmp_path / "empty", TABLE, name="archive/version"))


def test_a_truncated_pickle_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "short"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(TABLE, protocol=2)[:-20])
    with pytest.raises(AssetsError, match="short"):
        load_initial_states(path)


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
