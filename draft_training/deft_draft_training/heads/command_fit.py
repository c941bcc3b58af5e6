"""`deft train fit`: fit a draft head. Under torchrun every process takes a part of each batch."""

import argparse
import sys
from pathlib import Path

from deft_draft_training.config import load_config
from deft_draft_training.heads.data import LiveSamples, RecordedSamples, SampleStore
from deft_draft_training.heads.fit import HeadFitConfig, HeadTrainer
from deft_draft_training.heads.load import add_target_flags, load_target
from deft_draft_training.heads.workers import Workers


def main(arguments: list[str]) -> int:
    """Train, or go on training, in a run directory."""
    parser = argparse.ArgumentParser(prog="deft train fit", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="run directory")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--features", type=Path, metavar="DIR", help="what `record` wrote")
    source.add_argument(
        "--live", type=Path, nargs="+", metavar="DIR", help="episodes; features on the fly"
    )
    parser.add_argument("--stride", type=int, default=1, help="with --live: every how many steps")
    parser.add_argument("--config", type=Path, metavar="TOML", help="default: the published run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--tensorboard", action="store_true", help="show losses there, too")
    add_target_flags(parser)
    given = parser.parse_args(arguments)
    config = load_config(HeadFitConfig, given.config, given.overrides)
    workers = Workers.from_torchrun()  # first: it says which GPU is this process's
    try:
        target = load_target(given)
        store: SampleStore
        if given.features is not None:
            store = RecordedSamples(given.features, target.fingerprint())
        else:
            store = LiveSamples(target, tuple(given.live), given.stride)
        trainer = HeadTrainer(config, target, store, workers)
        trainer.run(given.out, given.tensorboard)
    finally:
        workers.close()
    if workers.rank == 0:
        held_out = sorted({int(store.episodes[one]) for one in trainer.split.held_out})
        sys.stdout.write(f"{given.out}: {config.steps} steps; held-out episodes {held_out}\n")
    return 0
