"""Demonstrations on disk: one checksummed file per episode, readable with numpy and Pillow alone.

The scripted expert of `scripts/tiny_libero` writes them.

A file is an uncompressed npz. Its members are the arrays of `Demonstration`, `frames` (the files
one after the other) and `frame_ends` (where each ends), and `header` (JSON, with a sha256 of the
others). Actions are in the training data's dialect: six numbers as the simulator takes them, then
the gripper, 1 open and 0 close, so that `conventions.to_robosuite` gives back what was executed.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage

from deft_core.datasets.episodes import DemonstrationError
from deft_core.types import Image

FORMAT = 2
SUFFIX = ".npz"

# Columns of `privileged`: what auxiliary losses may learn and a reasoning may say. Metres in the
# world frame; then, in shares of the picture from its upper left corner, the gripper and the boxes
# around what is handled and where it should go.
PRIVILEGED = (
    *("gripper_x", "gripper_y", "gripper_z", "opening"),
    *("object_x", "object_y", "object_z"),
    *("goal_x", "goal_y", "goal_z"),
    *("target_x", "target_y", "target_z"),
    *("gripper_left", "gripper_top"),
    *("object_left", "object_top", "object_right", "object_bottom"),
    *("goal_left", "goal_top", "goal_right", "goal_bottom"),
)


@dataclass(frozen=True)
class DemonstrationHeader:
    """How an episode came about."""

    suite: str
    task: int
    episode: int
    trial: int
    instruction: str
    succeeded: bool
    assets: str
    seed: int
    noise_sigma: float  # of this episode, in action units
    widened_metres: float
    frame_size: int
    encoding: str  # "jpeg" or "png"
    phases: tuple[str, ...]  # names of the numbers in `phase`
    subject: str = ""  # what is to be moved, by its name in the simulator
    place: str = ""  # where to
    format: int = FORMAT


# The arrays of a demonstration beside its frames, and how they are stored.
COLUMNS: Mapping[str, type] = {
    **dict.fromkeys(("labels", "executed", "state", "privileged"), np.float32),
    "phase": np.uint8,
    "simulator": np.float64,
}


@dataclass(frozen=True, eq=False)
class Demonstration:
    """One episode; row i of every array belongs to the frame the expert saw before step i."""

    header: DemonstrationHeader
    encoded: Sequence[bytes]  # [step] JPEG or PNG files, upright
    labels: NDArray[np.float32]  # [step, 7] the expert's clean action
    executed: NDArray[np.float32]  # [step, 7] what was executed, noise included
    state: NDArray[np.float32]  # [step, 8] what a policy may know of the robot
    privileged: NDArray[np.float32]  # [step, PRIVILEGED]
    phase: NDArray[np.uint8]  # [step] index into header.phases
    simulator: NDArray[np.float64]  # [step, state] as LIBERO stores states

    def __len__(self) -> int:
        return len(self.labels)

    def frame(self, step: int) -> Image:
        """The picture of a step, uint8 [size, size, 3]."""
        return decode_frame(self.encoded[step])

    def frames(self) -> NDArray[np.uint8]:
        """All pictures, [step, size, size, 3]; about 0.2 MB each at 256 pixels."""
        return np.stack([self.frame(step) for step in range(len(self))])


def decode_frame(content: bytes) -> Image:
    """The picture in a JPEG or PNG file; OSError where none can be decoded."""
    try:
        with PillowImage.open(io.BytesIO(content)) as picture:
            return np.asarray(picture.convert("RGB"))
    except (SyntaxError, PillowImage.DecompressionBombError) as error:
        raise OSError(str(error)) from error


def load_demonstration(path: Path) -> Demonstration:
    """Read an episode and check that nothing in it has changed; DemonstrationError otherwise."""
    arrays = _members(path, None)
    header, header_checksum = _header(path, arrays.pop("header", None))
    if checksum(arrays) != header_checksum:
        raise DemonstrationError(f"{path} is damaged: its checksum does not fit; delete it")
    ends = [0, *(int(end) for end in arrays["frame_ends"])]
    content = arrays["frames"].tobytes()
    encoded = [content[start:end] for start, end in zip(ends, ends[1:], strict=False)]
    try:
        columns: dict[str, NDArray[Any]] = {
            name: arrays[name].astype(kind, copy=False) for name, kind in COLUMNS.items()
        }
    except KeyError as error:
        raise DemonstrationError(f"{path} has no {error}; it is not a demonstration") from error
    return Demonstration(header, encoded, **columns)


def load_header(path: Path) -> DemonstrationHeader:
    """Only how an episode came about, without its frames; nothing else is checked."""
    return _header(path, _members(path, "header").get("header"))[0]


def find_demonstrations(folder: Path, tasks: Sequence[int] | None = None) -> Iterator[Path]:
    """Episode files below a folder, in order of task and episode."""
    wanted = None if tasks is None else {task_folder(folder, task) for task in tasks}
    for path in sorted(folder.glob(f"task*/episode*{SUFFIX}")):
        if wanted is None or path.parent in wanted:
            yield path


def task_folder(folder: Path, task: int) -> Path:
    """Where a task's episodes lie."""
    return folder / f"task{task:02d}"


def episode_path(folder: Path, task: int, episode: int) -> Path:
    """Where an episode lies."""
    return task_folder(folder, task) / f"episode{episode:04d}{SUFFIX}"


def checksum(arrays: Mapping[str, NDArray[np.generic]]) -> str:
    """Return the sha256 of a file's arrays: their names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _members(path: Path, only: str | None) -> dict[str, NDArray[np.generic]]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files if only in (None, name)}
    except FileNotFoundError as error:
        raise DemonstrationError(f"no demonstration at {path}") from error
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise DemonstrationError(f"{path} is damaged: {error}; delete it") from error


def _header(path: Path, packed: NDArray[np.generic] | None) -> tuple[DemonstrationHeader, str]:
    if packed is None:
        raise DemonstrationError(f"{path} has no header; it is not a demonstration")
    try:
        entries = json.loads(packed.tobytes())
        version, digest = entries["format"], str(entries.pop("sha256"))
    except (ValueError, KeyError, TypeError) as error:
        raise DemonstrationError(f"{path} has an unreadable header: {error}") from error
    known = {field.name for field in fields(DemonstrationHeader)}
    if version != FORMAT or set(entries) != known:
        raise DemonstrationError(
            f"{path} is of format {version}, this version reads {FORMAT}; record it again"
        )
    entries["phases"] = tuple(entries["phases"])
    return DemonstrationHeader(**entries), digest
