"""One of two processes that fit a head together; started by test_head_fit.py."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from deft_draft_training.heads.fit import HeadTrainer, RecordedSamples
from deft_draft_training.trainer import Workers
from tests.draft_training.golden_target import tiny_target
from tests.draft_training.test_head_fit import CONFIG


def main() -> None:
    torch.set_num_threads(1)
    with Workers.from_torchrun() as workers:
        target = tiny_target()
        store = RecordedSamples(Path(sys.argv[1]), target.fingerprint())
        config = replace(CONFIG, steps=6, log_every=1)
        HeadTrainer(config, target, store, workers).run(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
