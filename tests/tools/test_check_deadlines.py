"""The judge of the control loop's ordeal passes what is promised, and nothing else."""

import numpy as np
import pytest

from tests.tools.check_deadlines import judge

STOPPED_S = 7.0  # for three seconds


def told(**changes: object) -> dict[str, object]:
    """Two chunks at 10 Hz, a hold of a second, a stall, and another chunk."""
    numbers = [*range(8, 24), *[23] * 10, *range(24, 32)]
    at_s = 5 + 0.1 * np.arange(len(numbers))
    at_s[at_s > STOPPED_S] += 3.0
    commands = np.zeros((len(numbers), 9))  # time, waiting for a processor, action
    commands[:, 0], commands[:, 2], commands[:, 8] = at_s, 0.02, numbers
    taken_s = [0.0, 4.9, 5.7, 10.5]
    said = {"commands": commands, "taken_s": taken_s, "moves": 24, "holds": 10, "stalls": 1}
    return {**said, **changes}


def test_the_judge_passes_an_ordeal_as_promised():
    assert judge(told(), STOPPED_S, STOPPED_S + 3.0)


@pytest.mark.parametrize(
    ("column", "value"), [(3, np.nan), (3, 0.06), (2, -0.02)], ids=["NaN", "step", "change"]
)
def test_a_command_outside_the_rules_fails(column, value):
    said = told()
    said["commands"][3, column] = value
    assert not judge(said, STOPPED_S, STOPPED_S + 3.0)


def test_a_late_command_fails_unless_the_robot_had_no_processor():
    said = told()
    said["commands"][5:, 0] += 0.15
    assert not judge(said, STOPPED_S + 0.15, STOPPED_S + 3.15)
    said["commands"][5:, 1] += 0.14
    assert judge(said, STOPPED_S + 0.15, STOPPED_S + 3.15)


@pytest.mark.parametrize("taken_s", [6.9, 8.0])
def test_a_frame_from_before_the_stall_and_one_that_is_too_old_fail(taken_s):
    assert not judge(told(taken_s=[0.0, 4.9, 5.7, taken_s]), STOPPED_S, STOPPED_S + 3.0)
