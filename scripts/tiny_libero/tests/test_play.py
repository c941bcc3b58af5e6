"""Recording: what an episode holds, and that a recording goes on and keeps to itself."""

import fcntl
from dataclasses import replace

import numpy as np
import pytest

from deft_core.datasets.demonstrations import PRIVILEGED, load_demonstration
from deft_core.datasets.episodes import DemonstrationError
from deft_core.peers.conventions import to_robosuite
from deft_libero.simulator.environment import EnvironmentSettings, LiberoEnvironment
from deft_libero.simulator.scene import Goal
from deft_libero.simulator.suites import find_task
from tests.standins import stand_ins
from tests.typed import next_command
from tiny_libero_recipe.demos import main
from tiny_libero_recipe.expert.motion import NoiseSettings
from tiny_libero_recipe.play import (
    DemoKey,
    DemosSettings,
    episode_keys,
    play,
    variation,
)
from tiny_libero_recipe.pool import DemosJob, missing_keys, record

pytestmark = pytest.mark.libero
SMALL = EnvironmentSettings(frame_size=48, assets_folder=stand_ins(), fast=True)
SETTINGS = DemosSettings(
    "libero_object", tasks=(5,), episodes=2, trials=(0, 1), frame_size=48, encoding="png"
)


def test_an_episode_holds_clean_labels_beside_what_was_executed():
    environment = LiberoEnvironment(find_task("libero_object", 5), SMALL)
    demonstration = play(environment, SETTINGS, DemoKey(5, 0))
    environment.close()
    header, steps = demonstration.header, len(demonstration)
    assert header.succeeded
    assert (header.suite, header.task, header.trial) == ("libero_object", 5, 0)
    assert header.assets.startswith("stand-in ")
    assert demonstration.frames().shape == (steps, 48, 48, 3)
    assert demonstration.privileged.shape == (steps, len(PRIVILEGED))
    assert set(demonstration.labels[:, -1]) == {0.0, 1.0}, "1 opens, 0 closes"
    assert to_robosuite(demonstration.labels[0].astype(float))[-1] == -1.0
    noise = demonstration.executed[:, :6] - demonstration.labels[:, :6]
    assert np.abs(noise).max() > 0.01
    assert demonstration.labels[:, 3:6].std(axis=0).min() > 0.01, "every rotation is used"
    opening = demonstration.privileged[:, PRIVILEGED.index("opening")]
    closing = np.flatnonzero(demonstration.labels[:, -1] == 0.0)[0]
    assert opening[closing] > 0.07
    assert opening[-1] < 0.07


GOAL = Goal("in", "milk_1", "basket_1_contain_region")


def test_rounds_differ_and_things_are_moved_in_three_of_four_episodes():
    settings = replace(SETTINGS, episodes=8, moved_metres=0.03)
    beginnings = [variation(settings, key, [GOAL], []) for key in episode_keys(settings)]
    assert [one.widen_metres for one in beginnings] == [0.0, 0.03, 0.03, 0.03] * 2
    assert [one.seed for one in beginnings] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_in_some_episodes_the_task_changes():
    settings = replace(SETTINGS, episodes=400, rearranged=0.25)
    beginnings = [
        variation(settings, key, [GOAL], ["butter_1", "ketchup_1"])
        for key in episode_keys(settings)
    ]
    exchanged = [one.exchanged for one in beginnings if one.exchanged]
    asked = [one.goals for one in beginnings if one.goals]
    assert 25 < len(exchanged) < 75
    assert 25 < len(asked) < 75
    assert set(exchanged) == {("milk_1", "butter_1"), ("milk_1", "ketchup_1")}
    assert {goal.subject for (goal,) in asked} == {"butter_1", "ketchup_1"}
    assert {goal.target for (goal,) in asked} == {GOAL.target}


def test_another_thing_is_asked_for_in_words_and_brought():
    environment = LiberoEnvironment(find_task("libero_object", 5), SMALL)
    settings = replace(SETTINGS, episodes=40, rearranged=1.0)
    key = next(
        key
        for key in episode_keys(settings)
        if variation(settings, key, [GOAL], ["butter_1", "ketchup_1"]).goals
    )
    demonstration = play(environment, settings, key)
    environment.close()
    header = demonstration.header
    assert header.succeeded
    assert header.subject != "tomato sauce"
    assert header.instruction == f"pick up the {header.subject} and place it in the basket"
    columns = dict(zip(PRIVILEGED, demonstration.privileged.T, strict=True))
    inside = (columns["object_left"][-1] + columns["object_right"][-1]) / 2
    assert columns["goal_left"][-1] < inside < columns["goal_right"][-1], "it is in the basket"


def test_recording_goes_on_where_it_stopped(tmp_path):
    job = DemosJob(replace(SETTINGS, episodes=1), tmp_path, SMALL, num_workers=1)
    heard = []
    record(job, heard.append)
    assert [one.key for one in heard] == [DemoKey(5, 0)]
    path = DemoKey(5, 0).path(tmp_path)
    assert load_demonstration(path).header.succeeded
    written = path.stat().st_mtime_ns
    leftover = path.with_name(".episode0001.npz.123")  # of a writer that was killed
    leftover.write_bytes(b"half")
    record(job, heard.append)
    assert len(heard) == 1
    assert path.stat().st_mtime_ns == written
    assert not leftover.exists()
    assert missing_keys(replace(job, settings=SETTINGS)) == [DemoKey(5, 1)]
    with pytest.raises(DemonstrationError, match="sigma.*give another --out"):
        record(replace(job, settings=replace(SETTINGS, noise=NoiseSettings(0.0))), heard.append)


def test_two_runs_do_not_record_into_one_folder(tmp_path):
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DemonstrationError, match="another run"):
            record(DemosJob(SETTINGS, tmp_path, SMALL), print)


def test_the_command_ends_with_the_one_that_trains_on_what_it_recorded(tmp_path, capsys):
    where = ["--out", str(tmp_path), "--tasks", "5", "--size", "48", "--assets", str(stand_ins())]
    assert main(["libero_object", *where, "--episodes", "1"]) == 0
    assert next_command(capsys.readouterr().out)[2:5] == [
        "tiny_libero_recipe",
        "train",
        str(tmp_path),
    ]


def test_the_command_refuses_what_makes_no_sense(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    assert main(["libero_object", *out, "--episodes", "0"]) == 2
    assert main(["libero_object", *out, "--tasks", "11"]) == 2
    (tmp_path / "file").write_text("")
    assert main(["libero_object", "--out", str(tmp_path / "file"), "--episodes", "1"]) == 1
    errors = capsys.readouterr().err
    assert "--episodes" in errors
    assert "cannot write to" in errors
