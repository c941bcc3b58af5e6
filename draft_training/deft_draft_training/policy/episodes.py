"""Labelled episodes on disk: what a policy saw, what the expert would have done there.

One file per episode: a zip of arrays (`numpy.load` reads it, without pickle), frames as PNG bytes
of the size the policy sees. Files appear whole or not at all.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage

from deft_client.types import Image
from deft_draft_training.errors import DataError
from deft_draft_training.run_directory import write_atomically

_FIELDS = ("labels", "executed", "positions", "phases", "state", "frame_bytes", "frame_ends")


@dataclass(frozen=True, eq=False)
class LabelledEpisode:
    """One episode, one entry per step. Actions are in the training data's dialect."""

    instruction: str
    succeeded: bool
    frames: Sequence[Image]
    labels: NDArray[np.float64]  # [step, action_dim], what the expert would do
    executed: NDArray[np.float64]  # [step, action_dim], what was done instead
    positions: NDArray[np.float32]  # [step, value], for auxiliary losses
    phases: NDArray[np.str_]  # [step]
    state: NDArray[np.float32]  # [step, 8], the robot's own

    def save(self, path: Path) -> None:
        """Write to a file of its own."""
        encoded = [_encode(frame) for frame in self.frames]
        data = io.BytesIO()
        np.savez(
            data,
            instruction=np.array(self.instruction),
            succeeded=np.array(self.succeeded),
            labels=self.labels,
            executed=self.executed,
            positions=self.positions,
            phases=self.phases,
            state=self.state,
            frame_bytes=np.frombuffer(b"".join(encoded), np.uint8),
            frame_ends=np.cumsum([len(one) for one in encoded]),
        )
        write_atomically(path, data.getvalue())

    @classmethod
    def load(cls, path: Path) -> "LabelledEpisode":
        """Read a file, or raise `DataError` naming it."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                fields = {name: stored[name] for name in _FIELDS}
                instruction, succeeded = str(stored["instruction"]), bool(stored["succeeded"])
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise DataError(f"{path} is not a labelled episode ({error}); delete it") from error
        ends = fields["frame_ends"]
        starts = [0, *ends[:-1]]
        raw = fields["frame_bytes"].tobytes()
        frames = [_decode(raw[a:b]) for a, b in zip(starts, ends, strict=True)]
        return cls(
            instruction,
            succeeded,
            frames,
            fields["labels"],
            fields["executed"],
            fields["positions"],
            fields["phases"],
            fields["state"],
        )


def load_episodes(folders: Sequence[Path]) -> list[LabelledEpisode]:
    """All episodes of some folders, in the order of their names."""
    paths = [path for folder in folders for path in sorted(folder.rglob("*.npz"))]
    if not paths:
        places = ", ".join(str(folder) for folder in folders)
        raise DataError(f"no episodes in {places}; run `deft train policy collect` first")
    return [LabelledEpisode.load(path) for path in paths]


def _encode(frame: Image) -> bytes:
    data = io.BytesIO()
    PillowImage.fromarray(frame).save(data, "PNG", compress_level=3)
    return data.getvalue()


def _decode(data: bytes) -> Image:
    return np.array(PillowImage.open(io.BytesIO(data)))
