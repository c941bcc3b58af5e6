"""`deft-client datasets`: what a data set holds, and our episodes as LeRobot data sets."""

import numpy as np
import pytest

from deft_client.__main__ import main
from deft_core.datasets.episodes import StoredEpisode
from deft_core.datasets.formats import read_dataset
from deft_core.recordings import EpisodeHeader, RecordedStep, encode_header, encode_step
from deft_core.types import ActionChunk, ActOptions, Intervention, Observation
from tests.demonstrations import write_demonstrations

pytest.importorskip("pyarrow", reason="pip install 'deft-client[datasets]'")


def recording(path, part=0, session="arm", steps=2, intervention=None, has_state=True):
    rng = np.random.default_rng(part)
    content = encode_header(EpisodeHeader(session, 0.0, part=part))
    for index in range(steps):
        image = rng.integers(0, 256, (16, 24, 3), dtype=np.uint8)
        state = rng.normal(size=3).astype(np.float32)
        content += encode_step(
            RecordedStep(
                index,
                0.1 * index,
                Observation(image, "lift the cup", state=state if has_state else None),
                ActOptions(),
                ActionChunk(rng.normal(size=(2, 7)), intervention=intervention),
            )
        )
    path.write_bytes(content)


def test_show_says_what_is_in_it(tmp_path, capsys):
    recording(tmp_path / "one.deftrec")
    assert main(["datasets", "show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("recordings: 1 episodes, 2 steps (2 to 2 each)\n")
    assert "pictures of 24 x 16 pixels; state of 3 numbers" in shown
    assert "     1 x  lift the cup" in shown


def test_a_recording_comes_back_from_lerobots_format_to_the_bit(tmp_path, capsys):
    recording(tmp_path / "one.deftrec")
    command = ["datasets", "export", str(tmp_path / "one.deftrec"), "--fps", "10"]
    assert main([*command, "--out", str(tmp_path / "set")]) == 0
    assert "1 episodes, 2 steps" in capsys.readouterr().out
    (was,), (now,) = read_dataset(tmp_path / "one.deftrec"), read_dataset(tmp_path / "set")
    for recorded, stored in zip(was.steps(), now.steps(), strict=True):
        assert np.array_equal(recorded.observation.image, stored.observation.image)
        assert recorded.action.tobytes() == stored.action.tobytes()
        assert np.array_equal(recorded.observation.state, stored.observation.state)


def test_parts_of_a_long_recording_are_one_episode(tmp_path):
    recording(tmp_path / "1.deftrec")
    recording(tmp_path / "2.deftrec", session="another arm")
    recording(tmp_path / "3.deftrec", part=1)
    episodes = [[*one.steps()] for one in read_dataset(tmp_path)]
    assert [len(one) for one in episodes] == [4, 2]


def test_episodes_without_an_example_are_not_exported(tmp_path, capsys):
    write_demonstrations(tmp_path / "demos", episodes=3, steps=4)  # the last one fails
    command = ["datasets", "export", str(tmp_path / "demos"), "--fps", "20"]
    assert main([*command, "--out", str(tmp_path / "set")]) == 0
    assert "2 episodes, 8 steps" in capsys.readouterr().out
    recording(tmp_path / "held.deftrec", intervention=Intervention.CLAMP)
    command = ["datasets", "export", str(tmp_path / "held.deftrec"), "--fps", "20"]
    assert main([*command, "--out", str(tmp_path / "none")]) == 1
    assert "nothing to export" in capsys.readouterr().err


def test_recordings_with_and_without_state_get_a_folder_each(tmp_path, capsys):
    """One request without a state, as from a browser, once spoiled the whole recording."""
    recording(tmp_path / "1.deftrec", session="browser", steps=1, has_state=False)
    recording(tmp_path / "2.deftrec", session="arm", steps=3)
    assert main(["datasets", "show", str(tmp_path)]) == 0
    assert "no state in 1 episodes, state of 3 numbers in 1 episodes" in capsys.readouterr().out
    command = ["datasets", "export", str(tmp_path), "--fps", "10", "--out", str(tmp_path / "set")]
    assert main(command) == 0
    first, second, following = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path / 'set-1'}: 1 episodes, 1 steps: observation.images.image")
    assert "observation.state 3" in second
    assert following == f"next: deft train record {tmp_path / 'set-2'} --out features"


def test_an_export_reads_every_step_once(tmp_path, monkeypatch):
    """The first ones were decoded twice, to see whether there is an example among them."""
    recording(tmp_path / "one.deftrec", steps=3)
    (stored,) = read_dataset(tmp_path / "one.deftrec")
    read = []

    def steps():
        for step in stored.steps():
            read.append(step)
            yield step

    episodes = [StoredEpisode("one", steps)]
    monkeypatch.setattr("deft_client.commands.datasets.read_dataset", lambda *_: iter(episodes))
    command = ["datasets", "export", str(tmp_path), "--fps", "10", "--out", str(tmp_path / "set")]
    assert main(command) == 0
    assert len(read) == 3


def test_what_cannot_be_read_is_one_line_and_exit_code_1(tmp_path, capsys):
    assert main(["datasets", "show", str(tmp_path / "nowhere")]) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("deft-client datasets show: ")
    assert len(complaint.splitlines()) == 1
    recording(tmp_path / "one.deftrec")
    assert main(["datasets", "show", str(tmp_path), "--cameras", "wrist"]) == 1
    assert "leave out --cameras" in capsys.readouterr().err
