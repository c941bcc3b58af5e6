"""The expert solves episodes, answers for any scene, and does not remember."""

import numpy as np
import pytest

from deft_libero.errors import SimulationError
from deft_libero.simulator.conventions import CLOSE, OPEN
from deft_libero.simulator.suites import find_suite, find_task
from tests.libero.simulated import PHYSICS, physics, settle
from tiny_libero_recipe.expert.expert import Expert, Watch, read_goals
from tiny_libero_recipe.expert.motion import Manner
from tiny_libero_recipe.expert.pick import Phase
from tiny_libero_recipe.play import DemosSettings
from tiny_libero_recipe.pool import DemosJob, record

pytestmark = pytest.mark.libero


def begin(suite: str, number: int, trial: int):
    environment = physics(suite, number)
    environment.restart(trial)
    settle(environment)
    return environment, Expert.for_episode(environment)


@pytest.mark.parametrize(
    ("suite", "number", "trial"),
    [
        ("libero_object", 5, 40),  # a can into the basket
        ("libero_goal", 0, 42),  # a drawer
        ("libero_goal", 7, 44),  # a knob
    ],
)
def test_the_expert_reaches_the_goal(suite, number, trial):
    environment, expert = begin(suite, number, trial)
    watch, phases = Watch(), []
    for _ in range(find_suite(suite).step_limit):
        scene = environment.scene()
        label = expert.label(scene, watch.see(scene))
        assert np.abs(label.action).max() <= 1.0
        phases.append(label.phase)
        if environment.advance(label.action):
            break
    assert all(environment.scene().goals_held), phases[-5:]


def test_the_label_of_a_scene_does_not_depend_on_what_was_asked_before():
    environment, expert = begin("libero_object", 5, 0)
    first = environment.scene()
    label = expert.label(first)
    for _ in range(12):
        environment.advance(expert.label(environment.scene()).action)
    expert.label(environment.scene())
    np.testing.assert_array_equal(expert.label(first).action, label.action)


def test_after_a_push_the_label_leads_back_over_the_object():
    environment, expert = begin("libero_object", 5, 0)
    for _ in range(15):
        environment.advance(expert.label(environment.scene()).action)
    for _ in range(10):
        environment.advance(np.array([0.0, 1.0, 0.0, 0, 0, 0, OPEN]))
    scene = environment.scene()
    label = expert.label(scene)
    assert label.phase is Phase.APPROACH
    gap = label.object_position - scene.gripper.position
    assert label.action[:2] @ gap[:2] > 0
    assert label.action[-1] == OPEN


def test_the_lift_begins_slowly_and_becomes_fast():
    environment, expert = begin("libero_object", 5, 0)
    rises = []
    for _ in range(90):
        label = expert.label(environment.scene())
        if label.phase is Phase.LIFT:
            assert label.action[-1] == CLOSE
            rises.append(label.action[2])
        if environment.advance(label.action):
            break
    assert rises[0] < 0.35
    assert max(rises) > 0.8


def test_the_manner_of_an_episode_changes_its_labels_and_not_its_end():
    environment, _ = begin("libero_object", 5, 0)
    experts = [
        Expert.for_episode(environment, Manner.draw(np.random.default_rng(seed)))
        for seed in range(3)
    ]
    first = np.stack([expert.label(environment.scene()).action for expert in experts])
    assert np.ptp(first[:, :3], axis=0).max() > 0.02
    for _ in range(find_suite("libero_object").step_limit):
        if environment.advance(experts[1].label(environment.scene()).action):
            break
    assert all(environment.scene().goals_held)


def test_a_watch_counts_an_attempt_when_nothing_moves():
    environment, _ = begin("libero_object", 5, 0)
    watch, scene = Watch(), environment.scene()
    attempts = [watch.see(scene) for _ in range(60)]
    assert attempts[:20] == [0] * 20
    assert attempts[-1] == 2


def test_a_task_beyond_the_expert_is_refused_at_once():
    environment = physics("libero_10", 9)  # a mug into a microwave
    environment.restart(0)
    with pytest.raises(SimulationError, match="task 9 of libero_10"):
        Expert.for_episode(environment)


def test_goals_read_from_the_file_are_those_of_the_simulator():
    for suite, number in (("libero_object", 5), ("libero_goal", 3), ("libero_10", 2)):
        assert read_goals(find_task(suite, number)) == physics(suite, number).goals()


def test_tasks_the_expert_cannot_do_are_refused_at_the_start(tmp_path):
    job = DemosJob(DemosSettings("libero_90", tasks=(0, 33, 39)), tmp_path / "out", PHYSICS)
    with pytest.raises(SimulationError) as caught:
        record(job, print)
    for what in ("task 33", "close(microwave_1)", "task 39", "turnoff(flat_stove_1)"):
        assert what in str(caught.value)
    assert not (tmp_path / "out").exists()
