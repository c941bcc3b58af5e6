"""Recording: what an episode holds, and that a recording goes on and keeps to itself."""

import fcntl
from dataclasses import replace

import numpy as np
import pytest

from deft_client.libero.commands.demos import main
from deft_client.libero.demonstrations.files import PRIVILEGED, load_demonstration
from deft_client.libero.demonstrations.play import (
    DemoKey,
    DemosSettings,
    episode_keys,
    play,
    variation,
)
from deft_client.libero.demonstrations.pool import DemosJob, missing_keys, record
from deft_client.libero.errors import DemonstrationError
from deft_client.libero.expert.motion import NoiseSettings
from deft_client.libero.simulator.assets import STAND_INS
from deft_client.libero.simulator.conventions import to_robosuite
from deft_client.libero.simulator.environment import EnvironmentSettings, LiberoEnvironment
from deft_client.libero.simulator.suites import find_task
from tests.client.libero.simulated import needs_simulator
from tests.typed import next_command

pytestmark = needs_simulator
SMALL = EnvironmentSettings(frame_size=48, assets_folder=STAND_INS)
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


def test_rounds_differ_and_every_other_episode_is_widened():
    settings = replace(SETTINGS, episodes=4, widen_metres=0.03)
    beginnings = [variation(settings, key) for key in episode_keys(settings)]
    assert [one.widen_metres for one in beginnings] == [0.0, 0.03, 0.0, 0.03]
    assert [one.seed for one in beginnings] == [0, 0, 1, 1]


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
    where = ["--out", str(tmp_path), "--tasks", "5", "--size", "48", "--assets", "stand-in"]
    assert main(["libero_object", *where, "--episodes", "1"]) == 0
    assert next_command(capsys.readouterr().out)[:4] == ["deft", "train", "policy", str(tmp_path)]


def test_the_command_refuses_what_makes_no_sense(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    assert main(["libero_object", *out, "--episodes", "0"]) == 2
    assert main(["libero_object", *out, "--tasks", "11"]) == 2
    (tmp_path / "file").write_text("")
    assert main(["libero_object", "--out", str(tmp_path / "file"), "--episodes", "1"]) == 1
    errors = capsys.readouterr().err
    assert "--episodes must be at least 1" in errors
    assert "cannot write to" in errors
