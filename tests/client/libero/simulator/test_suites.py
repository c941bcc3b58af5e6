import pytest

from deft_client.libero.errors import UnknownSuiteError, UnknownTaskError
from deft_client.libero.simulator.suites import SUITE_NAMES, find_suite, find_task


def test_suites_have_the_step_limits_and_sizes_of_the_published_evaluations():
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
    with pytest.raises(UnknownSuiteError, match="Did you mean 'libero_goal'"):
        find_suite("libero_gaol")


def test_an_unknown_task_is_told_how_many_there_are():
    with pytest.raises(UnknownTaskError, match="tasks 0 to 9, got 10"):
        find_task("libero_goal", 10)
