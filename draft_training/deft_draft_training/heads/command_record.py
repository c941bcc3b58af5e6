"""`deft train record`: features of a target over demonstrations or recordings, into shards."""

import argparse
import shutil
import sys
from pathlib import Path

from deft_draft_training.errors import DataError
from deft_draft_training.heads.load import add_target_flags, load_target
from deft_draft_training.heads.record import RecordConfig, estimate, record

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
