"""What a folder of recorded features holds, by the file that says so. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from deft_core.errors import WireError
from deft_core.wire.formats import convert
from deft_draft_training.errors import DataError

INDEX = "index.json"
_FORMAT = 1


@dataclass(frozen=True)
class ShardEntry:
    """One file of the index."""

    name: str
    sha256: str
    num_samples: int
    last_observation: int  # number of the last observation it covers, for resuming


@dataclass(frozen=True)
class ShardIndex:
    """What a folder of shards holds. `fingerprint` tells the target the features came from."""

    fingerprint: str
    width: int
    dtype: str
    sources: tuple[str, ...]
    layers: tuple[int, ...] = ()  # whose states are recorded, for block heads
    shards: tuple[ShardEntry, ...] = ()
    format: int = _FORMAT

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def next_observation(self) -> int:
        """Where recording goes on."""
        return self.shards[-1].last_observation + 1 if self.shards else 0


def read_index(folder: Path) -> ShardIndex:
    """Read a folder's index, or raise `DataError`."""
    path = folder / INDEX
    try:
        index = convert(json.loads(path.read_text()), ShardIndex, name=INDEX)
    except FileNotFoundError:
        raise DataError(f"{path} is missing; run `deft train record` into {folder}") from None
    except (OSError, ValueError, WireError) as error:
        raise DataError(f"{path} is not an index of feature shards: {error}") from error
    if index.format != _FORMAT:
        raise DataError(f"{path} is of format {index.format}, this version reads {_FORMAT}")
    return index


def episodes_of(folder: Path) -> set[int]:
    """Numbers of the episodes whose features a folder holds."""
    episodes: set[int] = set()
    for entry in read_index(folder).shards:
        path = folder / entry.name
        try:
            with safe_open(path, "numpy") as shard:
                episodes.update(shard.get_tensor("episodes").tolist())
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read though {INDEX} names it: {error}") from error
    return episodes
