"""Records the target's features over observations into shards; a killed run goes on."""

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm

from deft_draft_training.errors import DataError
from deft_draft_training.heads.load import add_target_flags, load_target
from deft_draft_training.heads.observe import SourcedObservation, observations
from deft_draft_training.heads.samples import HeadSample
from deft_draft_training.heads.shards import ShardIndex, ShardWriter
from deft_draft_training.heads.target import FeatureTarget

_SHARD_BYTES = 1 << 29  # a shard is written at the latest when it has grown to this


@dataclass(frozen=True)
class RecordConfig:
    """What is recorded and how."""

    sources: tuple[Path, ...]
    stride: int = 1  # every how many steps
    batch_size: int = 8
    samples_per_shard: int = 512
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class SizeEstimate:
    """What a recording will take on disk."""

    num_observations: int
    bytes_per_sample: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.num_observations * self.bytes_per_sample


def estimate(target: FeatureTarget, config: RecordConfig) -> SizeEstimate:
    """Count the observations and measure one sample."""
    total = sum(1 for _ in observations(config.sources, config.stride))
    first = next(observations(config.sources, config.stride))
    sample = target.sample([first.observation], [first.episode], _dtype(config))[0]
    return SizeEstimate(total, _bytes([sample]))


def record(target: FeatureTarget, config: RecordConfig, folder: Path) -> ShardIndex:
    """Write every observation's features that the folder does not hold yet."""
    index = ShardIndex(
        fingerprint=target.fingerprint(),
        width=target.width,
        dtype=config.dtype,
        sources=tuple(f"{source}:{config.stride}" for source in config.sources),
    )
    writer = ShardWriter(folder, index)
    start = writer.index.next_observation
    rest = islice(observations(config.sources, config.stride), start, None)
    samples: list[HeadSample] = []
    size, last, held_bytes = min(config.batch_size, config.samples_per_shard), start - 1, 0
    with tqdm(desc="record", unit="action", initial=start, file=sys.stderr) as bar:
        for batch in _groups(rest, size):
            fresh = target.sample(
                [one.observation for one in batch], [one.episode for one in batch], _dtype(config)
            )
            bar.update(len(batch))
            samples += fresh
            held_bytes += _bytes(fresh)
            last = batch[-1].number
            if len(samples) >= config.samples_per_shard or held_bytes >= _SHARD_BYTES:
                writer.append(samples, last)
                samples, held_bytes = [], 0
    if samples:
        writer.append(samples, last)
    return writer.index


def _bytes(samples: Sequence[HeadSample]) -> int:
    return sum(
        tensor.numel() * tensor.element_size()
        for one in samples
        for tensor in (one.prompt_ids, one.patches, one.hidden, one.tokens)
    )


def _dtype(config: RecordConfig) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[config.dtype]


def _groups(items: Iterator[SourcedObservation], size: int) -> Iterator[list[SourcedObservation]]:
    while group := list(islice(items, size)):
        yield group


_MEGABYTE = 1e6


def main(arguments: list[str]) -> int:
    """Say how large it will be, then record what is not there yet."""
    parser = argparse.ArgumentParser(prog="deft train record", description=__doc__)
    parser.add_argument("sources", nargs="+", type=Path, help="folders of episodes")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of shards")
    parser.add_argument("--stride", type=int, default=1, help="every how many steps (default 1)")
    parser.add_argument("--batch-size", type=int, default=8, help="frames at a time (default 8)")
    parser.add_argument("--float32", action="store_true", help="twice the size of bfloat16")
    add_target_flags(parser)
    given = parser.parse_args(arguments)
    config = RecordConfig(
        tuple(given.sources),
        given.stride,
        given.batch_size,
        dtype="float32" if given.float32 else "bfloat16",
    )
    target = load_target(given)
    size = estimate(target, config)
    megabytes = size.total_bytes / _MEGABYTE
    sys.stderr.write(f"{size.num_observations} actions, {megabytes:,.1f} MB in {given.out}\n")
    _check_room(given.out, size.total_bytes)
    index = record(target, config, given.out)
    sys.stdout.write(f"{given.out}: {index.num_samples} actions in {len(index.shards)} shards\n")
    return 0


def _check_room(folder: Path, needed: int) -> None:
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise DataError(
            f"{folder} has room for {free / _MEGABYTE:,.0f} MB, the features need "
            f"{needed / _MEGABYTE:,.0f} MB; raise --stride, or fit with live features"
        )
