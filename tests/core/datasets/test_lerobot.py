"""LeRobot data sets: what we write comes back to the bit, and what others write is read."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from deft_core.datasets.episodes import DatasetError, StoredEpisode, StoredStep
from deft_core.datasets.formats import read_dataset
from deft_core.datasets.lerobot_export import write_lerobot
from deft_core.types import Observation

pytest.importorskip("pyarrow", reason="pip install 'deft-client[datasets]'")


def episodes(count: int = 3, steps: int = 4, cameras: tuple[str, ...] = ()) -> list[StoredEpisode]:
    return [
        StoredEpisode(f"made-up {number}", partial(iter, made_up(number, steps, cameras)))
        for number in range(count)
    ]


def made_up(seed: int, steps: int, cameras: tuple[str, ...]) -> list[StoredStep]:
    rng = np.random.default_rng(seed)

    def picture() -> np.ndarray:
        return rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)

    return [
        StoredStep(
            Observation(
                picture(),
                f"task {seed % 2}",
                {camera: picture() for camera in cameras},
                rng.normal(size=8).astype(np.float32),
            ),
            rng.normal(size=7),
        )
        for _ in range(steps)
    ]


def assert_same(found: list[StoredEpisode], wanted: list[StoredEpisode]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        for step, was in zip(one.steps(), other.steps(), strict=True):
            assert step.action.tobytes() == was.action.tobytes()
            assert np.array_equal(step.observation.image, was.observation.image)
            assert step.observation.instruction == was.observation.instruction
            assert np.array_equal(step.observation.state, was.observation.state)
            for seen, known in zip(
                step.observation.cameras.values(), was.observation.cameras.values(), strict=True
            ):
                assert np.array_equal(seen, known)


def test_pixels_and_actions_come_back_to_the_bit(tmp_path):
    wanted = episodes()
    (written,) = write_lerobot(wanted, tmp_path / "set", fps=20)
    assert (written.num_episodes, written.num_steps) == (3, 12)
    assert_same(list(read_dataset(tmp_path / "set")), wanted)


def test_further_cameras_come_back_where_they_are_named(tmp_path):
    wanted = episodes(cameras=("wrist",))
    write_lerobot(wanted, tmp_path / "set", fps=20)
    with pytest.raises(DatasetError, match=r"several cameras \(observation"):
        list(read_dataset(tmp_path / "set"))
    cameras = ("observation.images.image", "observation.images.wrist")
    assert_same(list(read_dataset(tmp_path / "set", cameras)), wanted)


def test_a_long_set_is_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr("deft_core.datasets.lerobot_export._FILE_BYTES", 5000)
    wanted = episodes(count=5)
    write_lerobot(wanted, tmp_path / "set", fps=20)
    assert len(list((tmp_path / "set/data").rglob("*.parquet"))) > 1
    assert_same(list(read_dataset(tmp_path / "set")), wanted)


def test_statistics_of_the_whole_are_those_of_all_rows(tmp_path):
    wanted = episodes(count=4, steps=5)
    write_lerobot(wanted, tmp_path / "set", fps=20)
    actions = np.stack([step.action for one in wanted for step in one.steps()])
    found = json.loads((tmp_path / "set/meta/stats.json").read_text())["action"]
    assert np.allclose(found["mean"], actions.mean(axis=0))
    assert np.allclose(found["std"], actions.std(axis=0))
    assert np.allclose(found["max"], actions.max(axis=0))
    assert found["count"] == [20]


def test_episodes_of_other_features_get_a_data_set_of_their_own(tmp_path):
    few, more = episodes(1), episodes(2, cameras=("wrist",))
    written = write_lerobot([more[0], *few, more[1]], tmp_path / "set", fps=20)
    assert [one.folder.name for one in written] == ["set-1", "set-2"]
    assert [one.num_episodes for one in written] == [2, 1]
    assert "observation.images.wrist 24 x 32 x 3" in written[0].features
    assert_same([*read_dataset(tmp_path / "set-2")], few)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["set-1", "set-2"]


def test_a_step_that_differs_within_its_episode_is_named(tmp_path):
    steps = [*made_up(0, 2, ()), *made_up(1, 1, ("wrist",))]
    mixed = StoredEpisode("made-up 7", partial(iter, steps))
    with pytest.raises(DatasetError, match=r"made-up 7: step 2 has observation.images.wrist 24 x"):
        write_lerobot([mixed], tmp_path / "set", fps=20)
    assert not (tmp_path / "set").exists()


def test_an_older_format_is_refused_with_the_way_out(tmp_path):
    meta = tmp_path / "meta"
    meta.mkdir()
    (meta / "info.json").write_text('{"codebase_version": "v2.1", "features": {}}')
    with pytest.raises(DatasetError, match="convert_dataset_v21_to_v30"):
        list(read_dataset(tmp_path))


@pytest.mark.parametrize(
    "template",
    [
        "data/{unknown}.parquet",
        "data/{chunk_index:01999999999d}",
        "data/{chunk_index.__class__.__mro__[1].x}",
        "../{file_index}.parquet",
    ],
)
def test_a_template_that_names_no_file_is_refused(tmp_path, template):
    write_lerobot(episodes(1), tmp_path / "set", fps=20)
    path = tmp_path / "set/meta/info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "data_path": template}))
    (episode,) = read_dataset(tmp_path / "set")
    with pytest.raises(DatasetError, match="data_path"):
        next(episode.steps())


def test_a_description_that_is_too_deep_is_refused(tmp_path):
    write_lerobot(episodes(1), tmp_path / "set", fps=20)
    (tmp_path / "set/meta/info.json").write_text("[" * 100_000)
    with pytest.raises(DatasetError, match="not a LeRobot description"):
        list(read_dataset(tmp_path / "set"))


def test_a_damaged_file_is_named(tmp_path):
    write_lerobot(episodes(), tmp_path / "set", fps=20)
    (path,) = (tmp_path / "set/data").rglob("*.parquet")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DatasetError, match="file-000.parquet"):
        list(next(read_dataset(tmp_path / "set")).steps())


def test_a_picture_that_would_fill_the_memory_is_refused_by_name(tmp_path, monkeypatch):
    write_lerobot(episodes(), tmp_path / "set", fps=20)
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 10)
    with pytest.raises(DatasetError, match=r"a picture cannot be decoded.*pixels"):
        list(next(read_dataset(tmp_path / "set")).steps())


def test_frames_of_a_video_are_those_of_their_timestamps(tmp_path):
    """Two episodes in one file: each gets its own part, frame by frame."""
    av = pytest.importorskip("av")
    wanted = [flat_episode(20), flat_episode(140)]
    write_lerobot(wanted, tmp_path / "set", fps=10)
    as_video(av, tmp_path / "set", [step for one in wanted for step in one.steps()])
    found = list(read_dataset(tmp_path / "set"))
    for one, other in zip(found, wanted, strict=True):
        for step, was in zip(one.steps(), other.steps(), strict=True):
            seen = step.observation.image.astype(int)
            assert abs(seen - was.observation.image).max() <= 4


def flat_episode(first: int) -> StoredEpisode:
    steps = [
        StoredStep(
            Observation(np.full((32, 32, 3), first + 10 * index, np.uint8), "hold"), np.zeros(7)
        )
        for index in range(10)
    ]
    return StoredEpisode(str(first), partial(iter, steps))


def as_video(av: object, root: Path, steps: list[StoredStep]) -> None:
    """Turn the pictures of a data set into one video, as LeRobot stores them by default."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    camera = "observation.images.image"
    path = root / f"videos/{camera}/chunk-000/file-000.mp4"
    path.parent.mkdir(parents=True)
    with av.open(str(path), "w") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
        for step in steps:
            frame = av.VideoFrame.from_ndarray(step.observation.image, format="rgb24")
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    info = json.loads((root / "meta/info.json").read_text())
    info["features"][camera]["dtype"] = "video"
    info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    (root / "meta/info.json").write_text(json.dumps(info))
    (data,) = (root / "data").rglob("*.parquet")
    parquet.write_table(parquet.read_table(data).drop_columns([camera]), data)
    (meta,) = (root / "meta/episodes").rglob("*.parquet")
    table = parquet.read_table(meta)
    for name, values in (
        ("chunk_index", [0, 0]),
        ("file_index", [0, 0]),
        ("from_timestamp", [0.0, 1.0]),
        ("to_timestamp", [1.0, 2.0]),
    ):
        table = table.append_column(f"videos/{camera}/{name}", arrow.array(values))
    parquet.write_table(table, meta)
