"""One task of every suite: it loads, takes an initial state and stands still. All of them are
checked by `deft-client assets check`."""

import numpy as np
import pytest
from PIL import Image

from deft_libero.commands.assets import CHECKED_SUITES, main
from deft_libero.simulator.assets_check import (
    check_task,
    find_strays,
    load_settled,
    pack_poses,
    settle_task,
)
from deft_libero.simulator.conventions import wait_action
from deft_libero.simulator.scene import Pose
from deft_libero.simulator.stepping import turned
from deft_libero.simulator.suites import NUM_TRIALS, find_suite, find_task
from tests.libero.simulated import PHYSICS, physics, settle
from tests.standins import stand_ins

pytestmark = pytest.mark.libero
ON_STAND_INS = ("--assets", str(stand_ins()))


@pytest.mark.parametrize(
    ("suite", "number", "trial"),
    [
        ("libero_spatial", 4, 13),
        ("libero_object", 3, 44),
        ("libero_goal", 9, 5),
        ("libero_10", 9, 30),
    ],
)
def test_a_task_stands_still(suite, number, trial):
    problems = check_task(find_task(suite, number), [trial], PHYSICS)
    assert not problems, "\n".join(problems)


def test_show_renders_a_scene(tmp_path, capsys):
    out = tmp_path / "scene.png"
    assert main(["show", "libero_object/5", "--out", str(out), "--size", "96", *ON_STAND_INS]) == 0
    assert "pick up the tomato sauce" in capsys.readouterr().out
    with Image.open(out) as picture:
        assert picture.size == (96, 96)


def test_check_says_what_episodes_would_be_played_with(capsys):
    selection = ("--suite", "libero_object", "--tasks", "3", "--trials", "44")
    assert main(["check", *selection, *ON_STAND_INS]) == 0
    said = capsys.readouterr().out
    assert "renders with " in said or "no OpenGL library" in said
    assert "stand-in" in said
    assert said.endswith("0 problems\n")


def test_a_folder_without_assets_is_refused(tmp_path, capsys):
    out = str(tmp_path / "scene.png")
    assert main(["show", "libero_object/5", "--out", out, "--assets", str(tmp_path)]) == 1
    assert "no readable scenes/" in capsys.readouterr().err


def test_questions_that_make_no_sense_are_answered_with_two(capsys):
    assert main(["show", "libero_object/99"]) == 2
    assert "0 to 9" in capsys.readouterr().err


def test_a_premise_that_does_not_hold_is_named():
    """The bowl is stored above the ramekin; another physics lets it fall beside."""
    environment = physics("libero_spatial", 5)
    environment.restart(0)
    settle(environment)
    assert environment.broken_premises() == ()
    joint = environment._inner.objects_dict["akita_black_bowl_1"].joints[-1]
    where = environment._inner.sim.data.get_joint_qpos(joint)
    environment._inner.sim.data.set_joint_qpos(joint, where + np.array([0.2, 0, 0, 0, 0, 0, 0]))
    environment.advance(wait_action())
    (broken,) = environment.broken_premises()
    assert str(broken) == "on(akita_black_bowl_1, glazed_rim_porcelain_ramekin_1)"


def test_record_writes_where_everything_rests(tmp_path):
    task, out = find_task("libero_object", 3), tmp_path / "settled.npz"
    selection = ("--suite", "libero_object", "--tasks", "3", "--trials", "0-1", *ON_STAND_INS)
    assert main(["record", str(out), *selection]) == 0
    with np.load(out) as stored:
        recorded = dict(stored)
    ((_, second),) = settle_task(task, [1], PHYSICS)
    assert find_strays(recorded, task, 1, second) == []
    assert find_strays(recorded, task, 0, second) != []


def test_every_trial_of_the_four_suites_is_recorded():
    members = load_settled()
    tasks = [task for suite in CHECKED_SUITES for task in find_suite(suite).tasks]
    assert len(members) == 2 * len(tasks)
    for task in tasks:
        assert len(members[f"{task.suite}/{task.number}/positions"]) == NUM_TRIALS
        assert len(members[f"{task.suite}/{task.number}/rotations"]) == NUM_TRIALS


def test_what_rests_elsewhere_than_recorded_is_named():
    task = find_task("libero_object", 3)
    here = {"can": Pose(np.array([0.1, -0.2, 0.9]), np.eye(3)), "box": Pose(np.zeros(3), np.eye(3))}
    tilted = turned(np.eye(3), np.array([0.3, 0.0, 0.0]))
    moved = here | {"can": Pose(np.array([0.1, -0.18, 0.9]), tilted)}
    recorded = pack_poses(task, [here, moved])
    assert find_strays(recorded, task, 0, here) == []
    assert find_strays(recorded, task, 1, moved) == []
    (text,) = find_strays(recorded, task, 0, moved)
    assert text.startswith("can rests 20.0 mm")
    assert text.endswith("17 degrees")
