"""Writes episodes as a LeRobot data set (format v3) that LeRobot's own loader opens.

Pictures are stored as PNG inside the parquet files, so that they come back to the bit; actions keep
their 64 bits. An episode is in memory while it is written, and nothing more.
"""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_core.datasets.episodes import DatasetError, StoredEpisode, StoredStep, need
from deft_core.datasets.lerobot import ACTION, STATE
from deft_core.types import Image
from deft_core.wire.images import ImageEncoding, encode_image

CAMERA = "observation.images."
MAIN_CAMERA = "image"
_VERSION = "v3.0"
_FILES_PER_CHUNK = 1000
_FILE_BYTES = 100 << 20
_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_COUNTERS = {"timestamp": "float32"} | dict.fromkeys(
    ("frame_index", "episode_index", "index", "task_index"), "int64"
)
_SAMPLED_PICTURES = 20  # per episode, for the statistics of pixels


# What LeRobot normalises with, by feature and then by name.
Statistics = dict[str, dict[str, NDArray[Any]]]


@dataclass(frozen=True)
class WrittenSet:
    """A data set that was written, and what its steps hold, for people."""

    folder: Path
    num_episodes: int
    num_steps: int
    features: str


def write_lerobot(
    episodes: Iterable[StoredEpisode], out: Path, fps: int, robot: str = "unknown"
) -> list[WrittenSet]:
    """Write episodes into a folder that must not be there yet, but for those without an example.

    A data set has one set of features. Where episodes differ in theirs, each kind gets a folder:
    `out` with a number behind its name.
    """
    writers: dict[str, _Writer] = {}
    if out.exists():
        raise DatasetError(f"{out} exists already; data sets are written as a whole")
    for episode in episodes:
        steps = list(episode.steps())
        if not any(step.is_example for step in steps):
            continue
        features = _describe(steps, episode.name)
        kind = json.dumps(features)
        if kind not in writers:
            aside = out.with_name(f"{out.name}.part-{len(writers) + 1}")
            writers[kind] = _Writer(aside, features, fps, robot)
        writers[kind].add(steps)
    if not writers:
        raise DatasetError("none of the episodes has a step, so there is nothing to export")
    folders = [out.with_name(f"{out.name}-{number + 1}") for number in range(len(writers))]
    if len(writers) == 1:
        folders = [out]
    return [one.finish(folder) for one, folder in zip(writers.values(), folders, strict=True)]


class _Writer:
    """One data set while it is written: data files of about 100 MB of whole episodes each."""

    def __init__(self, aside: Path, features: Mapping[str, Any], fps: int, robot: str) -> None:
        shutil.rmtree(aside, ignore_errors=True)
        self._aside, self._features, self._fps, self._robot = aside, features, fps, robot
        self._tasks: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []  # of `meta/episodes`, but for the statistics
        self._statistics: list[Statistics] = []  # of each episode
        self._num_steps = 0
        self._held: list[Any] = []  # tables of the file that is begun
        self._file = 0

    def add(self, steps: Sequence[StoredStep]) -> None:
        """Take in an episode."""
        if sum(table.nbytes for table in self._held) > _FILE_BYTES:
            self._write()
        numbers = self._count(steps)
        pictures = {
            name: [_picture_of(step, name) for step in steps]
            for name in self._features
            if name.startswith(CAMERA)
        }
        self._statistics.append(_episode_statistics(numbers, pictures))
        self._held.append(_arrow_table(numbers, pictures))

    def finish(self, out: Path) -> WrittenSet:
        """Write what is left, and give the data set its name."""
        if out.exists():
            raise DatasetError(f"{out} exists already; data sets are written as a whole")
        self._write()
        self._write_meta()
        self._aside.rename(out)
        sizes = [f"{name} {_size(self._features, name)}" for name in self._features]
        return WrittenSet(out, len(self._rows), self._num_steps, ", ".join(sizes))

    def _count(self, steps: Sequence[StoredStep]) -> dict[str, NDArray[Any]]:
        """Count an episode in; its columns of numbers."""
        first, count = self._num_steps, len(steps)
        instructions = [step.observation.instruction for step in steps]
        tasks = [self._tasks.setdefault(one, len(self._tasks)) for one in instructions]
        numbers: dict[str, NDArray[Any]] = {
            "timestamp": (np.arange(count) / self._fps).astype(np.float32),
            "frame_index": np.arange(count),
            "episode_index": np.full(count, len(self._rows)),
            "index": np.arange(first, first + count),
            "task_index": np.array(tasks),
            ACTION: np.stack([step.action for step in steps]),
        }
        if STATE in self._features:
            states = [step.observation.state for step in steps]
            numbers[STATE] = np.stack(states)  # type: ignore[arg-type]
        self._rows.append(
            {
                "episode_index": len(self._rows),
                "tasks": list(dict.fromkeys(instructions)),
                "length": count,
                "data/chunk_index": self._file // _FILES_PER_CHUNK,
                "data/file_index": self._file % _FILES_PER_CHUNK,
                "dataset_from_index": first,
                "dataset_to_index": first + count,
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
        )
        self._num_steps += count
        return numbers

    def _write(self) -> None:
        path = self._aside / "data" / _name(self._file)
        path.parent.mkdir(parents=True, exist_ok=True)
        table = need("pyarrow").concat_tables(self._held)
        need("pyarrow.parquet").write_table(table, path)
        self._held, self._file = [], self._file + 1

    def _write_meta(self) -> None:
        arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
        meta = self._aside / "meta"
        episodes = meta / "episodes" / _name(0)
        episodes.parent.mkdir(parents=True)
        rows = []
        for row, statistics in zip(self._rows, self._statistics, strict=True):
            columns = {
                f"stats/{feature}/{name}": value.tolist()
                for feature, numbers in statistics.items()
                for name, value in numbers.items()
            }
            rows.append({**row, **columns})
        parquet.write_table(arrow.Table.from_pylist(rows), episodes)
        parquet.write_table(_task_table(self._tasks), meta / "tasks.parquet")
        counters = {
            name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in _COUNTERS.items()
        }
        info = {
            "codebase_version": _VERSION,
            "robot_type": self._robot,
            "total_episodes": len(self._rows),
            "total_frames": self._num_steps,
            "total_tasks": len(self._tasks),
            "chunks_size": _FILES_PER_CHUNK,
            "data_files_size_in_mb": _FILE_BYTES >> 20,
            "video_files_size_in_mb": 200,
            "fps": self._fps,
            "splits": {"train": f"0:{len(self._rows)}"},
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": None,
            "features": {**self._features, **counters},
        }
        overall = {
            name: _merged([one[name] for one in self._statistics]) for name in self._statistics[0]
        }
        (meta / "info.json").write_text(json.dumps(info, indent=4), "utf-8")
        (meta / "stats.json").write_text(json.dumps(overall, indent=4), "utf-8")


def _describe(steps: Sequence[StoredStep], name: str) -> dict[str, Any]:
    """The features of an episode, which all its steps must share."""
    first = _features_of(steps[0])
    for number, step in enumerate(steps):
        found = _features_of(step)
        if found != first:
            raise DatasetError(
                f"{name}: step {number} has {_difference(found, first)} in the steps before it"
            )
    return first


def _features_of(step: StoredStep) -> dict[str, Any]:
    """The features of a step, as LeRobot describes them."""
    seen = step.observation
    pictures = {MAIN_CAMERA: seen.image, **seen.cameras}
    features: dict[str, Any] = {
        CAMERA + camera: {
            "dtype": "image",
            "shape": [*image.shape],
            "names": ["height", "width", "channels"],
        }
        for camera, image in pictures.items()
    }
    if seen.state is not None:
        features[STATE] = {"dtype": "float32", "shape": [len(seen.state)], "names": None}
    features[ACTION] = {"dtype": "float64", "shape": [len(step.action)], "names": None}
    return features


def _difference(here: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The first feature that differs, and how."""
    name = next(one for one in (*here, *before) if here.get(one) != before.get(one))
    return f"{name} {_size(here, name)}, where it is {_size(before, name)}"


def _size(features: Mapping[str, Any], name: str) -> str:
    if name not in features:
        return "missing"
    return " x ".join(map(str, features[name]["shape"]))


def _picture_of(step: StoredStep, name: str) -> Image:
    camera = name.removeprefix(CAMERA)
    return step.observation.image if camera == MAIN_CAMERA else step.observation.cameras[camera]


def _arrow_table(
    numbers: Mapping[str, NDArray[Any]], pictures: Mapping[str, Sequence[Image]]
) -> Any:
    arrow = need("pyarrow")
    columns = {}
    for name, values in numbers.items():
        one = arrow.array(values.reshape(-1))
        wide = values.ndim == 2 and values.shape[1] > 1
        columns[name] = arrow.FixedSizeListArray.from_arrays(one, values.shape[1]) if wide else one
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    for name, images in pictures.items():
        rows = [{"bytes": encode_image(image, ImageEncoding.PNG), "path": None} for image in images]
        columns[name] = arrow.array(rows, type=kind)
    return arrow.table(columns)


def _episode_statistics(
    numbers: Mapping[str, NDArray[Any]], pictures: Mapping[str, Sequence[Image]]
) -> Statistics:
    found: Statistics = {}
    for name, values in numbers.items():
        rows = values.reshape(len(values), -1).astype(np.float64)
        found[name] = _statistics(rows, len(rows))
    for name, images in pictures.items():
        stride = max(1, len(images) // _SAMPLED_PICTURES)
        chosen = np.stack(images[::stride])
        numbers = _statistics(chosen.reshape(-1, 3) / 255.0, len(chosen))
        shaped = {key: value[:, None, None] for key, value in numbers.items() if key != "count"}
        found[name] = {**numbers, **shaped}
    return found


def _statistics(rows: NDArray[np.float64], count: int) -> dict[str, NDArray[Any]]:
    """Per column of [row, column]."""
    quantiles = np.quantile(rows, list(_QUANTILES.values()), axis=0)
    return {
        "min": rows.min(axis=0),
        "max": rows.max(axis=0),
        "mean": rows.mean(axis=0),
        "std": rows.std(axis=0),
        "count": np.array([count]),
        **dict(zip(_QUANTILES, quantiles, strict=True)),
    }


def _task_table(tasks: Mapping[str, int]) -> Any:
    """One row per task; the text is the index of the data frame that pandas reads it as."""
    arrow = need("pyarrow")
    table = arrow.table({"task_index": list(tasks.values()), "task": list(tasks)})
    columns = [
        {
            "name": name,
            "field_name": name,
            "pandas_type": kind,
            "numpy_type": kind,
            "metadata": None,
        }
        for name, kind in (("task_index", "int64"), ("task", "object"))
    ]
    described = {"index_columns": ["task"], "column_indexes": [], "columns": columns}
    return table.replace_schema_metadata({"pandas": json.dumps(described)})


def _merged(parts: Sequence[Mapping[str, NDArray[np.float64]]]) -> dict[str, Any]:
    """The statistics of all episodes together; quantiles are their mean, weighted by length."""
    counts = np.array([float(one["count"][0]) for one in parts])
    weights = counts / counts.sum()

    def mean(values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        return np.asarray(np.tensordot(weights, np.stack(values), axes=1))

    middle = mean([one["mean"] for one in parts])
    spread = mean([one["std"] ** 2 + (one["mean"] - middle) ** 2 for one in parts])
    return {
        "min": np.min([one["min"] for one in parts], axis=0).tolist(),
        "max": np.max([one["max"] for one in parts], axis=0).tolist(),
        "mean": middle.tolist(),
        "std": np.sqrt(spread).tolist(),
        "count": [int(counts.sum())],
        **{name: mean([one[name] for one in parts]).tolist() for name in _QUANTILES},
    }


def _name(file: int) -> str:
    return f"chunk-{file // _FILES_PER_CHUNK:03d}/file-{file % _FILES_PER_CHUNK:03d}.parquet"
