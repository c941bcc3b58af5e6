"""Which data set a folder is, and LIBERO's and our own formats through the same door."""

import json

import numpy as np
import pytest

from deft_core.datasets.demonstrations import load_demonstration
from deft_core.datasets.episodes import DatasetError
from deft_core.datasets.formats import read_dataset
from tests.demonstrations import write_demonstrations

h5py = pytest.importorskip("h5py", reason="pip install 'deft-client[datasets]'")


@pytest.fixture
def libero_file(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "put_it_down_demo.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["problem_info"] = json.dumps({"language_instruction": "put it down"})
        for number in (10, 2):
            episode = data.create_group(f"demo_{number}")
            episode["actions"] = np.full((3, 7), 1.0 if number == 10 else -1.0)
            observed = episode.create_group("obs")
            observed["agentview_rgb"] = rng.integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
            observed["eye_in_hand_rgb"] = rng.integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
            observed["ee_pos"], observed["ee_ori"] = np.zeros((3, 3)), np.ones((3, 3))
            observed["gripper_states"] = np.full((3, 2), 0.5)
    return path


def test_liberos_episodes_are_upright_and_in_the_order_of_their_numbers(libero_file):
    first, second = read_dataset(libero_file.parent)
    assert first.name.endswith("demo_2")
    assert second.name.endswith("demo_10")
    step = next(first.steps())
    with h5py.File(libero_file) as file:
        stored = file["data/demo_2/obs/agentview_rgb"][0]
    assert np.array_equal(step.observation.image, stored[::-1, ::-1])
    assert step.observation.state.tolist() == [0, 0, 0, 1, 1, 1, 0.5, 0.5]
    assert step.observation.instruction == "put it down"
    assert step.action[-1] == 1.0  # robosuite's -1 is open
    assert next(second.steps()).action[-1] == 0.0


def test_liberos_wrist_goes_along_when_named(libero_file):
    cameras = ("agentview_rgb", "eye_in_hand_rgb")
    step = next(next(read_dataset(libero_file, cameras)).steps())
    assert list(step.observation.cameras) == ["eye_in_hand_rgb"]


def test_another_hdf5_file_is_refused_by_name(tmp_path):
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["numbers"] = np.zeros(3)
    with pytest.raises(DatasetError, match="other.hdf5"):
        list(read_dataset(tmp_path))


def test_a_folder_of_nothing_known_says_what_is_known(tmp_path):
    with pytest.raises(DatasetError, match=r"Known are: LeRobot \(meta/info.json\); RLDS"):
        read_dataset(tmp_path)
    with pytest.raises(DatasetError, match="no such"):
        read_dataset(tmp_path / "nothing")


def test_alohas_hdf5_is_refused_with_what_to_do(tmp_path):
    with h5py.File(tmp_path / "episode_0.hdf5", "w") as file:
        file["observations/qpos"] = np.zeros((2, 14))
        file["action"] = np.zeros((2, 14))
    with pytest.raises(DatasetError, match="once they are converted to LeRobot v3"):
        list(read_dataset(tmp_path))


def broken_file(libero_file, name, link):
    with h5py.File(libero_file, "a") as file:
        del file["data/demo_2"][name]
        file["data/demo_2"][name] = link
    return next(iter(read_dataset(libero_file)))


@pytest.mark.parametrize("name", ["obs", "actions"])
def test_a_loop_of_links_is_named(libero_file, name):
    episode = broken_file(libero_file, name, h5py.SoftLink(f"/data/demo_2/{name}"))
    with pytest.raises(DatasetError, match="demo_2 cannot be read"):
        next(episode.steps())


@pytest.mark.parametrize("name", ["obs", "actions"])
def test_a_link_into_another_file_is_refused(libero_file, name):
    other = libero_file.with_name("other.hdf5")
    other.write_bytes(libero_file.read_bytes())
    episode = broken_file(libero_file, name, h5py.ExternalLink(other, f"/data/demo_10/{name}"))
    with pytest.raises(DatasetError, match="link into another file"):
        next(episode.steps())


def test_actions_that_are_no_numbers_are_named(libero_file):
    episode = broken_file(libero_file, "actions", b"text")
    with pytest.raises(DatasetError, match="demo_2 cannot be read"):
        next(episode.steps())


def test_demonstrations_hold_the_robots_state(tmp_path):
    folder = write_demonstrations(tmp_path / "demos", episodes=1)
    (path,) = folder.glob("task*/*.npz")
    shown = load_demonstration(path)
    (episode,) = read_dataset(folder)
    found = [step.observation.state for step in episode.steps()]
    np.testing.assert_array_equal(found, shown.state)
