"""Feature shards: recorded samples on disk, in files that say what they are and what they hold.

A folder holds `index.json` and `shard-00000.safetensors` ... . A shard packs samples end to end;
the index knows its checksum, which samples it has and which target they were computed with.
Recording appends: a killed run goes on behind its last whole shard.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from deft_draft_training.errors import DataError
from deft_draft_training.heads.samples import HeadSample
from deft_draft_training.run_directory import explained, write_atomically

INDEX = "index.json"
_FORMAT = 1
_READ_BYTES = 1 << 22


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
    shards: tuple[ShardEntry, ...] = field(default_factory=tuple)
    format: int = _FORMAT

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return sum(one.num_samples for one in self.shards)

    @property
    def next_observation(self) -> int:
        """Where recording goes on."""
        return self.shards[-1].last_observation + 1 if self.shards else 0


def read_index(folder: Path) -> ShardIndex:
    """Read a folder's index, or raise `DataError`."""
    path = folder / INDEX
    try:
        stored = json.loads(path.read_text())
        shards = tuple(ShardEntry(**one) for one in stored.pop("shards"))
        index = ShardIndex(**{**stored, "sources": tuple(stored["sources"]), "shards": shards})
    except FileNotFoundError:
        raise DataError(f"{path} is missing; run `deft train record` into {folder}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not an index of feature shards: {error}") from error
    if index.format != _FORMAT:
        raise DataError(f"{path} is of format {index.format}, this version reads {_FORMAT}")
    return index


class ShardWriter:
    """Appends shards to a folder; refuses one that other features are in."""

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        self.folder = folder
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
        if (folder / INDEX).exists():
            stored = read_index(folder)
            if replace(stored, shards=()) != index:
                raise DataError(
                    f"{folder} holds features of another target, source or format "
                    f"(fingerprint {stored.fingerprint[:12]}, here {index.fingerprint[:12]}); "
                    "choose another folder"
                )
            index = stored
        self.index = index

    def append(self, samples: Sequence[HeadSample], last_observation: int) -> None:
        """Write one shard and then name it in the index: it is there whole, or not at all."""
        name = f"shard-{len(self.index.shards):05d}.safetensors"
        data = save(_pack(samples))
        write_atomically(self.folder / name, data)
        digest = hashlib.sha256(data).hexdigest()
        entry = ShardEntry(name, digest, len(samples), last_observation)
        self.index = replace(self.index, shards=(*self.index.shards, entry))
        write_atomically(self.folder / INDEX, json.dumps(asdict(self.index), indent=1).encode())


def iterate_shards(folder: Path, fingerprint: str) -> Iterator[list[HeadSample]]:
    """The samples of each shard, after checking that it is what the index says."""
    index = read_index(folder)
    if index.fingerprint != fingerprint:
        raise DataError(
            f"{folder} holds features of another checkpoint (fingerprint "
            f"{index.fingerprint[:12]}, the target here is {fingerprint[:12]}); record again"
        )
    for entry in index.shards:
        yield read_shard(folder, entry)


def read_shard(folder: Path, entry: ShardEntry) -> list[HeadSample]:
    """One shard's samples, mapped from the file: they may be more than memory holds."""
    path = folder / entry.name
    try:
        digest = _digest(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}) though {INDEX} names it; delete both its "
            "entry and those behind it, and record again"
        ) from error
    if digest != entry.sha256:
        raise DataError(f"{path} is damaged: its checksum is not the one in {INDEX}; record again")
    try:
        return _unpack(load_file(path))
    except (SafetensorError, KeyError) as error:
        raise DataError(f"{path} is not a feature shard: {error}") from error


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _pack(samples: Sequence[HeadSample]) -> dict[str, Tensor]:
    def ends(lengths: Sequence[int]) -> Tensor:
        return torch.tensor(lengths).cumsum(0)

    return {
        "episodes": torch.tensor([one.episode for one in samples]),
        "prompt_ids": torch.cat([one.prompt_ids for one in samples]),
        "prompt_ends": ends([len(one.prompt_ids) for one in samples]),
        "patches": torch.stack([one.patches for one in samples]),
        "hidden": torch.cat([one.hidden for one in samples]),
        "hidden_ends": ends([len(one.hidden) for one in samples]),
        "tokens": torch.stack([one.tokens for one in samples]),
    }


def _unpack(packed: dict[str, Tensor]) -> list[HeadSample]:
    def parts(name: str, ends: str) -> Sequence[Tensor]:
        stops = packed[ends].tolist()
        return [packed[name][a:b] for a, b in zip([0, *stops], stops, strict=False)]

    rows = zip(
        packed["episodes"].tolist(),
        parts("prompt_ids", "prompt_ends"),
        packed["patches"],
        parts("hidden", "hidden_ends"),
        packed["tokens"],
        strict=True,
    )
    return [HeadSample(*row) for row in rows]
