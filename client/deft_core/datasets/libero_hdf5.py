"""LIBERO's own demonstrations: one HDF5 file per task, pictures as OpenGL draws them.

Pictures are turned upright, and actions are brought into the dialect that OpenVLA's fine-tunes are
trained in: six numbers as stored, then the gripper, 1 open and 0 closed.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_core.datasets.episodes import DatasetError, StoredEpisode, StoredStep, need, pick_cameras
from deft_core.peers.conventions import from_robosuite, upright
from deft_core.types import Observation

_PICTURES = "_rgb"


def read_hdf5(path: Path, cameras: Sequence[str]) -> Iterator[StoredEpisode]:
    """Yield the episodes of one file, or of every file below a folder, in order."""
    h5py = need("h5py")
    for file in [path] if path.is_file() else sorted(path.rglob("*.hdf5")):
        try:
            with h5py.File(file, "r") as opened:
                names = sorted(opened["data"], key=lambda name: int(name.rpartition("_")[2]))
        except (OSError, KeyError, ValueError) as error:
            raise DatasetError(
                f"{file}: not a file of LIBERO demonstrations: {error}. Of HDF5 only those are "
                "read; ALOHA's and others once they are converted to LeRobot v3"
            ) from error
        for name in names:
            yield StoredEpisode(f"{file}:{name}", partial(_steps, file, name, cameras))


def _steps(file: Path, name: str, cameras: Sequence[str]) -> Iterator[StoredStep]:
    try:
        yield from _read(file, name, cameras)
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise DatasetError(f"{file}: {name} cannot be read: {error}") from error


def _read(file: Path, name: str, cameras: Sequence[str]) -> Iterator[StoredStep]:
    with need("h5py").File(file, "r") as opened:
        episode = _inside(opened["data"], name, file)
        observed = _inside(episode, "obs", file)
        there = tuple(sorted(key for key in observed if key.endswith(_PICTURES)))
        if not cameras and "agentview_rgb" in there:
            there = ("agentview_rgb",)
        own, further = pick_cameras(there, cameras, file)
        pictures = {camera: _inside(observed, camera, file) for camera in (own, *further)}
        instruction = _instruction(opened["data"], file)
        state = _state(observed)
        actions = from_robosuite(np.asarray(_inside(episode, "actions", file)))
        for index, action in enumerate(actions):
            observation = Observation(
                upright(pictures[own][index]),
                instruction,
                {camera: upright(pictures[camera][index]) for camera in further},
                None if state is None else state[index],
            )
            yield StoredStep(observation, action)


def _inside(group: Any, name: str, file: Path) -> Any:
    """A member of a group; a link into another file is refused."""
    if isinstance(group.get(name, getlink=True), need("h5py").ExternalLink):
        raise DatasetError(f"{file}: {group.name}/{name} is a link into another file")
    return group[name]


def _state(observed: Any) -> NDArray[np.float32] | None:
    """[step, 8]: position, orientation and the two fingers, where all are stored."""
    names = ("ee_pos", "ee_ori", "gripper_states")
    if any(name not in observed for name in names):
        return None
    return np.concatenate([np.asarray(observed[name]) for name in names], axis=1, dtype=np.float32)


def _instruction(data: Any, file: Path) -> str:
    try:
        found = json.loads(data.attrs["problem_info"])["language_instruction"]
    except (KeyError, ValueError, TypeError) as error:
        raise DatasetError(f"{file}: no instruction in data's attribute problem_info") from error
    return "".join(found) if isinstance(found, list) else str(found)
