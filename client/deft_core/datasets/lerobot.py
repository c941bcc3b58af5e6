"""LeRobot data sets (format v3): parquet files with one row per step, pictures inside or as videos.

A file holds many episodes; `meta/episodes` says which rows and which part of a video are whose.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from deft_core.datasets.demonstrations import decode_frame
from deft_core.datasets.episodes import DatasetError, StoredEpisode, StoredStep, need, pick_cameras
from deft_core.types import Image, Observation

ACTION, STATE = "action", "observation.state"
_PICTURES = ("image", "video")
_PLACE = ("episode_index", "data/chunk_index", "data/file_index")


@dataclass(frozen=True)
class _Dataset:
    """What `meta/` says, and which cameras are wanted."""

    root: Path
    info: Mapping[str, Any]
    tasks: Mapping[int, str]
    cameras: tuple[str, ...]  # the observation's own first

    def is_video(self, camera: str) -> bool:
        """Whether its pictures lie in video files."""
        return bool(self.info["features"][camera]["dtype"] == "video")


def read_lerobot(root: Path, cameras: Sequence[str]) -> Iterator[StoredEpisode]:
    """Yield the episodes by number."""
    dataset = _open(root, cameras)
    for place in _places(dataset):
        name = f"{root}:{place['episode_index']}"
        yield StoredEpisode(name, partial(_steps, dataset, place))


def _open(root: Path, cameras: Sequence[str]) -> _Dataset:
    try:
        info = json.loads((root / "meta/info.json").read_text("utf-8"))
        version, features = str(info["codebase_version"]), dict(info["features"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DatasetError(f"{root}/meta/info.json: not a LeRobot description: {error}") from error
    if not version.startswith("v3."):
        raise DatasetError(
            f"{root}: LeRobot format {version}, v3 is read; LeRobot's own script "
            "lerobot.datasets.v30.convert_dataset_v21_to_v30 converts it"
        )
    if ACTION not in features:
        raise DatasetError(f"{root}: no feature {ACTION!r}; there are {', '.join(features)}")
    there = tuple(name for name, one in features.items() if one["dtype"] in _PICTURES)
    own, further = pick_cameras(there, cameras, root)
    tasks = _table(root / "meta/tasks.parquet").to_pydict()
    (texts,) = (column for name, column in tasks.items() if name != "task_index")
    numbered = dict(zip(tasks["task_index"], texts, strict=True))
    return _Dataset(root, info, numbered, (own, *further))


def _table(path: Path, columns: Sequence[str] | None = None, episode: int | None = None) -> Any:
    """A parquet file, or only some columns and one episode of it."""
    parquet = need("pyarrow.parquet")
    filters = None if episode is None else [("episode_index", "=", episode)]
    try:
        return parquet.read_table(path, columns=columns, filters=filters)
    except (OSError, ValueError, KeyError) as error:  # pyarrow's errors are one of these
        raise DatasetError(f"{path}: cannot be read: {error}") from error


def _places(dataset: _Dataset) -> Iterator[Mapping[str, Any]]:
    """Where each episode lies, in order."""
    columns = [*_PLACE]
    for camera in filter(dataset.is_video, dataset.cameras):
        columns += [f"videos/{camera}/{one}" for one in ("chunk_index", "file_index")]
        columns += [f"videos/{camera}/from_timestamp"]
    files = sorted(dataset.root.glob("meta/episodes/*/*.parquet"))
    rows = [row for file in files for row in _table(file, columns).to_pylist()]
    yield from sorted(rows, key=lambda row: int(row["episode_index"]))


def _steps(dataset: _Dataset, place: Mapping[str, Any]) -> Iterator[StoredStep]:
    stored = [camera for camera in dataset.cameras if not dataset.is_video(camera)]
    has_state = STATE in dataset.info["features"]
    columns = [ACTION, "timestamp", "task_index", *([STATE] if has_state else []), *stored]
    path = _path(
        dataset,
        "data_path",
        chunk_index=place["data/chunk_index"],
        file_index=place["data/file_index"],
    )
    rows = _table(path, columns, place["episode_index"]).to_pylist()
    videos = {
        camera: _frames(dataset, camera, place, [row["timestamp"] for row in rows])
        for camera in filter(dataset.is_video, dataset.cameras)
    }
    for row in rows:
        pictures = [
            next(videos[camera]) if camera in videos else _picture(row[camera], path)
            for camera in dataset.cameras
        ]
        observation = Observation(
            pictures[0],
            dataset.tasks[row["task_index"]],
            dict(zip(dataset.cameras[1:], pictures[1:], strict=True)),
            np.atleast_1d(np.asarray(row[STATE], np.float32)) if has_state else None,
        )
        action = np.atleast_1d(np.asarray(row[ACTION], dtype=np.float64))
        yield StoredStep(observation, action)


def _path(dataset: _Dataset, name: str, **fields: object) -> Path:
    """The file that a template of `info.json` names; widths are bounded, as in `{:03d}`."""
    template = str(dataset.info.get(name))
    try:
        if re.search(r":[^}]{4}", template):
            raise ValueError("a field is wider than three characters say")
        path = dataset.root / template.format(**fields)
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise DatasetError(
            f"{dataset.root}/meta/info.json: {name} is {template!r}, which names no file: {error!r}"
        ) from error
    if not path.resolve().is_relative_to(dataset.root.resolve()):
        raise DatasetError(f"{dataset.root}/meta/info.json: {name} leads outside of the data set")
    return path


def _picture(stored: Mapping[str, Any], path: Path) -> Image:
    """A picture of a row: the content of its file, or the file's name."""
    content = stored.get("bytes") or (path.parents[2] / str(stored.get("path"))).read_bytes()
    try:
        return decode_frame(content)
    except OSError as error:
        raise DatasetError(f"{path}: a picture cannot be decoded: {error}") from error


def _frames(
    dataset: _Dataset, camera: str, place: Mapping[str, Any], timestamps: Sequence[float]
) -> Iterator[Image]:
    """The video's frames at some times of an episode, which ascend."""
    av = need("av")
    path = _path(
        dataset,
        "video_path",
        video_key=camera,
        chunk_index=place[f"videos/{camera}/chunk_index"],
        file_index=place[f"videos/{camera}/file_index"],
    )
    start = place[f"videos/{camera}/from_timestamp"]
    slack = 0.5 / float(dataset.info["fps"])
    wanted = iter([start + one for one in timestamps])
    try:
        with av.open(str(path)) as opened:
            stream = opened.streams.video[0]
            opened.seek(int(start / stream.time_base), stream=stream)
            time = next(wanted)
            for frame in opened.decode(stream):
                while frame.time > time - slack:
                    yield frame.to_ndarray(format="rgb24")
                    time = next(wanted)
    except StopIteration:
        return
    except OSError as error:  # PyAV's errors are kinds of OSError
        raise DatasetError(f"{path}: cannot be decoded: {error}") from error
    raise DatasetError(f"{path}: ends before the episode's last step, at {time:.3f} s")
