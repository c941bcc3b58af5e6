"""Records the target's features over observations into shards, files that say what they hold.

A folder holds `index.json` and `shard-00000.safetensors` ... . A shard packs samples end to end;
the index knows its checksum, which samples it has and which target they were computed with.
Recording appends: a killed run goes on behind its last whole shard.
"""

import hashlib
import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from shlex import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from tqdm import tqdm

from deft_core.datasets.flags import read_cameras
from deft_core.files import write_atomically
from deft_core.types import Observation
from deft_draft_training.errors import ConfigError, DataError
from deft_draft_training.heads.index import INDEX, ShardEntry, ShardIndex, read_index
from deft_draft_training.heads.samples import EpisodeSource, HeadSample
from deft_draft_training.heads.states import StatesRecorder, StatesSample
from deft_draft_training.heads.target import FeatureTarget, load_target
from deft_draft_training.run_directory import explained
from deft_policies.commands.parse import target_flags
from deft_policies.progress import shown

_READ_BYTES = 1 << 22


Sample = HeadSample | StatesSample


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

    def append(self, samples: Sequence[Sample], last_observation: int) -> None:
        """Write one shard and then name it in the index: it is there whole, or not at all."""
        name = f"shard-{len(self.index.shards):05d}.safetensors"
        data = save(_pack(samples))
        digest = hashlib.sha256(data).hexdigest()
        entry = ShardEntry(name, digest, len(samples), last_observation)
        longer = replace(self.index, shards=(*self.index.shards, entry))
        index = json.dumps(asdict(longer), indent=1).encode()
        for path, content in ((self.folder / name, data), (self.folder / INDEX, index)):
            with explained(path):
                write_atomically(path, content)
        self.index = longer


def iterate_shards(folder: Path, fingerprint: str) -> Iterator[list[Sample]]:
    """The samples of each shard, after checking that it is what the index says."""
    index = read_index(folder)
    if index.fingerprint != fingerprint:
        raise DataError(
            f"{folder} holds features of another checkpoint (fingerprint "
            f"{index.fingerprint[:12]}, the target here is {fingerprint[:12]}); record again"
        )
    for entry in index.shards:
        yield read_shard(folder, entry)


def read_shard(folder: Path, entry: ShardEntry) -> list[Sample]:
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


def _pack(samples_of_shard: Sequence[Sample]) -> dict[str, Tensor]:
    def ends(lengths: Sequence[int]) -> Tensor:
        return torch.tensor(lengths).cumsum(0)

    with_states = [sample for sample in samples_of_shard if isinstance(sample, StatesSample)]
    if with_states:
        return {
            "episodes": torch.tensor([sample.episode for sample in with_states]),
            "states": torch.cat([sample.states for sample in with_states]),
            "states_ends": ends([len(sample.states) for sample in with_states]),
            "tokens": torch.cat([sample.tokens for sample in with_states]),
            "tokens_ends": ends([len(sample.tokens) for sample in with_states]),
        }
    samples = [sample for sample in samples_of_shard if isinstance(sample, HeadSample)]
    return {
        "episodes": torch.tensor([sample.episode for sample in samples]),
        "prompt_ids": torch.cat([sample.prompt_ids for sample in samples]),
        "prompt_ends": ends([len(sample.prompt_ids) for sample in samples]),
        "patches": torch.stack([sample.patches for sample in samples]),
        "hidden": torch.cat([sample.hidden for sample in samples]),
        "hidden_ends": ends([len(sample.hidden) for sample in samples]),
        "tokens": torch.stack([sample.tokens for sample in samples]),
    }


def _unpack(packed: dict[str, Tensor]) -> list[Sample]:
    def parts(name: str, ends: str) -> Sequence[Tensor]:
        stops = packed[ends].tolist()
        return [packed[name][a:b] for a, b in zip([0, *stops], stops, strict=False)]

    if "states" in packed:
        answers = zip(
            packed["episodes"].tolist(),
            parts("states", "states_ends"),
            parts("tokens", "tokens_ends"),
            strict=True,
        )
        return [StatesSample(*row) for row in answers]
    rows = zip(
        packed["episodes"].tolist(),
        parts("prompt_ids", "prompt_ends"),
        packed["patches"],
        parts("hidden", "hidden_ends"),
        packed["tokens"],
        strict=True,
    )
    return [HeadSample(*row) for row in rows]


_SHARD_BYTES = 1 << 29  # a shard is written at the latest when it has grown to this


Sampler = Callable[[Sequence[Observation], Sequence[int]], list[Sample]]


@dataclass(frozen=True)
class RecordConfig:
    """What is recorded and how."""

    source: EpisodeSource
    batch_size: int = 8
    samples_per_shard: int = 512
    dtype: torch.dtype = torch.bfloat16
    layers: tuple[int, ...] = ()  # whose states are recorded, for block heads
    reasoning: bool = False  # of answers with reasoning; with `layers` alone

    def __post_init__(self) -> None:
        if min(self.batch_size, self.samples_per_shard) < 1:
            raise ConfigError(
                f"frames at a time and samples of a shard must be at least 1, got "
                f"{self.batch_size} and {self.samples_per_shard}"
            )

    def sampler(self, target: FeatureTarget) -> Sampler:
        """What answers frames and reads the features."""
        if not self.layers:
            return lambda frames, episodes: [*target.sample(frames, episodes, self.dtype)]
        recorder = StatesRecorder(target.policy, self.layers, self.reasoning)
        return lambda frames, episodes: [*recorder.sample(frames, episodes, self.dtype)]


def estimate(target: FeatureTarget, config: RecordConfig) -> tuple[int, int]:
    """Count the observations, and measure the bytes of one sample."""
    observations = config.source.observations()
    total = sum(1 for _ in tqdm(observations, desc="count", unit="frame", file=sys.stderr))
    if not total:
        raise DataError("none of the episodes has a step, so there is nothing to record")
    episode, observation = next(config.source.observations())
    return total, _bytes(config.sampler(target)([observation], [episode]))


def record(
    target: FeatureTarget, config: RecordConfig, folder: Path, total: int | None = None
) -> ShardIndex:
    """Write every observation's features that the folder does not hold yet; `total` is shown."""
    index = ShardIndex(
        fingerprint=target.fingerprint(),
        width=target.width,
        dtype=str(config.dtype).removeprefix("torch."),
        sources=tuple(
            ":".join((str(path), str(config.source.stride), *config.source.cameras))
            for path in config.source.datasets
        ),
        layers=config.layers,
    )
    sample = config.sampler(target)
    writer = ShardWriter(folder, index)
    start = writer.index.next_observation
    rest = islice(config.source.observations(), start, None)
    samples: list[Sample] = []
    size, last, held_bytes = min(config.batch_size, config.samples_per_shard), start - 1, 0
    with tqdm(desc="record", unit="action", initial=start, total=total, file=sys.stderr) as bar:
        for batch in iter(lambda: list(islice(rest, size)), []):
            episodes, observations = zip(*batch, strict=True)
            fresh = sample(observations, episodes)
            bar.update(len(batch))
            samples += fresh
            held_bytes += _bytes(fresh)
            last += len(batch)
            if len(samples) >= config.samples_per_shard or held_bytes >= _SHARD_BYTES:
                writer.append(samples, last)
                samples, held_bytes = [], 0
    if samples:
        writer.append(samples, last)
    return writer.index


def _bytes(samples: Sequence[Sample]) -> int:
    return sum(
        tensor.numel() * tensor.element_size()
        for sample in samples
        for tensor in vars(sample).values()
        if isinstance(tensor, Tensor)
    )


_MEGABYTE = 1e6


def run(flags: Namespace) -> int:
    """Say how large it will be, then record what is not there yet."""
    config = RecordConfig(
        EpisodeSource(tuple(flags.sources), flags.stride, read_cameras(flags)),
        flags.batch_size,
        dtype=torch.float32 if flags.float32 else torch.bfloat16,
        layers=flags.layers,
        reasoning=flags.reasoning,
    )
    with shown():
        target = load_target(flags)
    num_observations, sample_bytes = estimate(target, config)
    needed = num_observations * sample_bytes
    sys.stderr.write(f"{num_observations} actions, {needed / _MEGABYTE:,.1f} MB in {flags.out}\n")
    _check_room(flags.out, needed)
    index = record(target, config, flags.out, num_observations)
    sys.stdout.write(
        f"{flags.out}: {index.num_samples} actions in {len(index.shards)} shards\n"
        f"next: deft train fit --features {quote(str(flags.out))} --out runs/head "
        f"{target_flags(flags)}\n"
    )
    return 0


def _check_room(folder: Path, needed: int) -> None:
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise DataError(
            f"{folder} has room for {free / _MEGABYTE:,.0f} MB, the features need "
            f"{needed / _MEGABYTE:,.0f} MB; raise --stride, or fit with live features"
        )
