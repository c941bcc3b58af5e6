"""Fits a draft head to a target: the loop, for one process or several under torchrun.

On one process a killed run resumes to the bit: what a step sees and how it is disturbed are
functions of the seed and the step's number. Several processes share each batch, so that two
processes with half the batch each take the steps that one takes with all of it.
"""

import argparse
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from deft_draft_training.config import load_config, plain
from deft_draft_training.heads.data import (
    LiveSamples,
    RecordedSamples,
    SampleStore,
    Split,
    split_by_episode,
)
from deft_draft_training.heads.loss import HeadLossConfig, head_losses, medusa_losses
from deft_draft_training.heads.samples import HeadBatch, collate
from deft_draft_training.heads.target import FeatureTarget, add_target_flags, load_target
from deft_draft_training.heads.workers import Workers
from deft_draft_training.optimizer import (
    OptimizerConfig,
    TrainingPrecision,
    WeightAverage,
    build_optimizers,
    computing_in,
    rate_fraction,
    update,
)
from deft_draft_training.policy.data import chosen_at
from deft_draft_training.run_directory import RunDirectory, RunProgress
from deft_policies.decoding.drafts.eagle import EagleHead, HeadSizes
from deft_policies.decoding.drafts.medusa import MedusaHeads, MedusaSizes


class HeadKind(Enum):
    """What is fitted."""

    EAGLE = "eagle"
    MEDUSA = "medusa"


@dataclass(frozen=True)
class HeadFitConfig:
    """A head's training run. Defaults are the published ones where there are any."""

    kind: HeadKind = HeadKind.EAGLE
    heads: int = 0  # attention heads (EAGLE; 0: as the target) or parallel heads (Medusa; 0: 6)
    mlp_width: int = 0  # 0: as the target
    loss: HeadLossConfig = field(default_factory=HeadLossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: TrainingPrecision = TrainingPrecision.FLOAT32
    steps: int = 20000
    batch_size: int = 16  # over all processes
    average_decay: float = 0.0
    held_out_share: float = 0.05
    save_every: int = 500
    log_every: int = 50
    seed: int = 0


class HeadTrainer:
    """Everything one run needs, built once; `run` goes on from wherever the directory stands."""

    def __init__(
        self,
        config: HeadFitConfig,
        target: FeatureTarget,
        store: SampleStore,
        workers: Workers | None = None,
    ) -> None:
        self.config, self.target, self.store = config, target, store
        self.workers = workers or Workers.alone()
        self.split: Split = split_by_episode(store.episodes, config.held_out_share, config.seed)
        self.head: EagleHead | MedusaHeads = build_head(config, target).to(target.weight.device)
        self.optimizers = build_optimizers(self.head, config.optimizer)
        self.average = WeightAverage(self.head, config.average_decay)

    def run(self, directory: Path, with_board: bool = False) -> nn.Module:
        """Train to the configured step and return the (averaged) head."""
        fingerprint = self.target.fingerprint()
        is_first = self.workers.rank == 0
        described = {**plain(self.config), "target": fingerprint}
        run = RunDirectory(directory, described, with_board and is_first)
        progress, extra = run.load(self.head, self.optimizers)
        self.average.restore(extra)
        steps = tqdm(
            range(progress.step, self.config.steps),
            initial=progress.step,
            total=self.config.steps,
            file=sys.stderr,
            disable=not is_first,
        )
        for step in steps:
            losses = self._step(step)
            done = step + 1
            if is_first and done % self.config.log_every == 0:
                run.log(done, losses)
            if is_first and (done % self.config.save_every == 0 or done == self.config.steps):
                seen = done * self.config.batch_size
                run.save(RunProgress(done, seen), self.head, self.optimizers, self.average.state())
        self.average.copy_to(self.head)
        return self.head

    def _step(self, step: int) -> dict[str, float]:
        config = self.config
        chosen = chosen_at(len(self.split.train), config.batch_size, config.seed, step)
        own = self.split.train[self.workers.share(chosen)]
        samples = self.store.get([int(number) for number in own])
        batch = collate(samples, self.target.table)
        with computing_in(config.precision, batch.hidden.device):
            parts = self._losses(batch, step)
        parts["loss"].backward()  # type: ignore[no-untyped-call]
        self.workers.average_gradients(self.head)
        fraction = rate_fraction(config.optimizer, step, config.steps)
        norm = update(self.head, self.optimizers, config.optimizer, fraction)
        self.average.follow(self.head)
        values = {name: float(value.detach()) for name, value in parts.items()}
        return {**self.workers.average(values), "gradient_norm": norm}

    def _losses(self, batch: HeadBatch, step: int) -> dict[str, Tensor]:
        if isinstance(self.head, MedusaHeads):
            states = self.head(batch.at_guesses(batch.hidden))
            actions = self.target.actions
            return {"loss": medusa_losses(states, self.target.logits, batch.tokens, actions)}
        own = self.workers.share(np.arange(self.config.batch_size))
        seeds = [self._seed(step, int(place)) for place in own]
        config, target = self.config.loss, self.target
        logits = target.every_logit if config.whole_vocabulary else target.logits
        losses = head_losses(self.head, logits, batch, config, seeds)
        return {
            "loss": losses.total,
            "regression": losses.regression,
            "distillation": losses.distillation,
            "distance": losses.distance,
            "agreement": losses.agreement,
        }

    def _seed(self, step: int, place: int) -> int:
        """Of the noise on one sample of one step, whichever process has it."""
        mixed = np.random.SeedSequence((self.config.seed, step, place))
        return int(mixed.generate_state(1)[0])


def build_head(config: HeadFitConfig, target: FeatureTarget) -> EagleHead | MedusaHeads:
    """A fresh head of the target's width, the same for the same seed."""
    torch.manual_seed(config.seed)
    llm = target.policy.parts.target.model.config.llm
    if config.kind is HeadKind.MEDUSA:
        return MedusaHeads(MedusaSizes(llm.width, config.heads or 6))
    sizes = HeadSizes(
        width=llm.width,
        mlp_width=config.mlp_width or llm.mlp,
        num_heads=config.heads or llm.heads,
        num_kv_heads=config.heads or llm.kv_heads,
        norm_eps=llm.rms_norm_eps,
        rope_theta=llm.rope_theta,
    )
    return EagleHead(sizes)


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
