"""Fits a head and kills itself, as hard as can be, before a step; started by test_head_fit.py."""

import os
import signal
import sys
from pathlib import Path

import torch

from deft_draft_training.heads.fit import HeadTrainer, RecordedSamples
from tests.draft_training.golden_target import tiny_target
from tests.draft_training.test_head_fit import KILLED


def main() -> None:
    torch.set_num_threads(1)
    shards, run, killed_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    target = tiny_target()
    trainer = HeadTrainer(KILLED, target, RecordedSamples(shards, target.fingerprint()))
    step_of = trainer._step

    def step_or_die(step: int) -> dict[str, float]:
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return step_of(step)

    trainer._step = step_or_die  # type: ignore[method-assign]
    trainer.run(run)


if __name__ == "__main__":
    main()
