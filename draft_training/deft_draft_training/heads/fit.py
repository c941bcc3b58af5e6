"""Fits a draft head to a target: the loop, for one process or several under torchrun.

On one process a killed run resumes to the bit: what a step sees and how it is disturbed are
functions of the seed and the step's number. Several processes share each batch, so that two
processes with half the batch each take the steps that one takes with all of it.
"""

import sys
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from deft_client.commands.program import CommandParser
from deft_client.datasets.flags import add_camera_flag, read_cameras
from deft_draft_training.config import load_config, plain
from deft_draft_training.heads.data import (
    LiveSamples,
    RecordedSamples,
    SampleStore,
    Split,
    split_by_episode,
)
from deft_draft_training.heads.loss import HeadLossConfig, head_losses, medusa_losses
from deft_draft_training.heads.samples import EpisodeSource, HeadBatch, collate
from deft_draft_training.heads.target import (
    FeatureTarget,
    add_target_flags,
    load_target,
)
from deft_draft_training.heads.workers import Workers
from deft_draft_training.optimizer import computing_in
from deft_draft_training.run_directory import RunDirectory
from deft_draft_training.trainer import FitConfig, Trainer, chosen_at
from deft_policies.commands.parse import target_flags
from deft_policies.decoding.eagle import EagleHead, HeadSizes
from deft_policies.decoding.medusa import MedusaHeads, MedusaSizes

PUBLISHED_STEPS = 20_000
EPOCHS = 100


class HeadKind(Enum):
    """What is fitted."""

    EAGLE = "eagle"
    MEDUSA = "medusa"


@dataclass(frozen=True)
class HeadFitConfig(FitConfig):
    """A head's training run. Defaults are the published ones where there are any."""

    steps: int = 0  # 0: EPOCHS over the samples, at most PUBLISHED_STEPS
    kind: HeadKind = HeadKind.EAGLE
    heads: int = 0  # attention heads (EAGLE; 0: as the target) or parallel heads (Medusa; 0: 6)
    mlp_width: int = 0  # 0: as the target
    loss: HeadLossConfig = field(default_factory=HeadLossConfig)
    held_out_share: float = 0.05


class HeadTrainer(Trainer[EagleHead | MedusaHeads]):
    """Everything one run needs, built once; `run` goes on from wherever the directory stands."""

    def __init__(
        self,
        config: HeadFitConfig,
        target: FeatureTarget,
        store: SampleStore,
        workers: Workers | None = None,
    ) -> None:
        self.target, self.store = target, store
        self.workers = workers or Workers.alone()
        self.split: Split = split_by_episode(store.episodes, config.held_out_share, config.seed)
        config = self.config = choose_steps(config, len(self.split.train))
        super().__init__(config, build_head(config, target).to(target.weight.device))

    def run(self, directory: Path, with_board: bool = False) -> nn.Module:
        """Train to the configured step and return the (averaged) head."""
        described = {**plain(self.config), "target": self.target.fingerprint()}
        with RunDirectory(directory, described, with_board, self.workers.rank == 0) as run:
            return self._train(run)

    def _step(self, step: int) -> dict[str, float]:
        config = self.config
        chosen = chosen_at(len(self.split.train), config.batch_size, config.seed, step)
        own = self.split.train[self.workers.share(chosen)]
        samples = self.store.get([int(number) for number in own])
        batch = collate(samples, self.target.table)
        with computing_in(config.precision, batch.hidden.device):
            parts = self._losses(batch, step)
        parts["loss"].backward()  # type: ignore[no-untyped-call]
        self.workers.average_gradients(self.net)
        norm = self._update(step)
        values = {name: float(value.detach()) for name, value in parts.items()}
        return {**self.workers.average(values), "gradient_norm": norm}

    def _losses(self, batch: HeadBatch, step: int) -> dict[str, Tensor]:
        if isinstance(self.net, MedusaHeads):
            states = self.net(batch.at_guesses(batch.hidden))
            actions = self.target.actions
            return {"loss": medusa_losses(states, self.target.logits, batch.tokens, actions)}
        own = self.workers.share(np.arange(self.config.batch_size))
        seeds = [self._seed(step, int(place)) for place in own]
        config, target = self.config.loss, self.target
        logits = target.every_logit if config.whole_vocabulary else target.logits
        return head_losses(self.net, logits, batch, config, seeds)

    def _seed(self, step: int, place: int) -> int:
        """Of the noise on one sample of one step, whichever process has it."""
        mixed = np.random.SeedSequence((self.config.seed, step, place))
        return int(mixed.generate_state(1)[0])


def choose_steps(config: HeadFitConfig, num_samples: int) -> HeadFitConfig:
    """Where no number of steps is given: by the samples, a tenth of them at most for warming up."""
    if config.steps:
        return config
    steps = min(EPOCHS * max(1, num_samples // config.batch_size), PUBLISHED_STEPS)
    warm_up_steps = min(config.optimizer.warm_up_steps, steps // 10)
    optimizer = replace(config.optimizer, warm_up_steps=warm_up_steps)
    return replace(config, steps=steps, optimizer=optimizer)


def build_head(config: HeadFitConfig, target: FeatureTarget) -> EagleHead | MedusaHeads:
    """A fresh head of the target's width, the same for the same seed."""
    torch.manual_seed(config.seed)
    llm = target.policy.model.network.config.llm
    if config.kind is HeadKind.MEDUSA:
        return MedusaHeads(MedusaSizes(llm.width, config.heads or 6))
    sizes = HeadSizes(
        width=llm.width,
        mlp_width=config.mlp_width or llm.mlp_width,
        num_heads=config.heads or llm.num_heads,
        num_kv_heads=config.heads or llm.num_kv_heads,
        norm_eps=llm.norm_eps,
        rope_theta=llm.rope_theta,
    )
    return EagleHead(sizes)


def main(arguments: list[str]) -> int:
    """Train, or go on training, in a run directory."""
    parser = CommandParser(prog="deft train fit", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="run directory")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--features", type=Path, metavar="DIR", help="what `record` wrote")
    source.add_argument(
        "--live", type=Path, nargs="+", metavar="DATA", help="data sets; features on the fly"
    )
    parser.add_argument("--stride", type=int, default=1, help="with --live: every how many steps")
    add_camera_flag(parser)
    parser.add_argument("--config", type=Path, metavar="TOML", help="default: the published run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help=f"such as steps=N (default: {EPOCHS} epochs, at most {PUBLISHED_STEPS} steps)",
    )  # fmt: skip
    parser.add_argument("--tensorboard", action="store_true", help="show losses there, too")
    add_target_flags(parser)
    given = parser.parse_args(arguments)
    config = load_config(HeadFitConfig, given.config, given.overrides)
    if 0 < config.steps <= config.optimizer.warm_up_steps:
        sys.stderr.write(
            f"deft train fit: {config.steps} steps end before the {config.optimizer.warm_up_steps} "
            "of warming up do; --set optimizer.warm_up_steps=N\n"
        )
    workers = Workers.from_torchrun()  # first: it says which GPU is this process's
    try:
        target = load_target(given)
        store: SampleStore
        if given.features is not None:
            store = RecordedSamples(given.features, target.fingerprint())
        else:
            episodes = EpisodeSource(tuple(given.live), given.stride, read_cameras(given))
            store = LiveSamples(target, episodes)
        trainer = HeadTrainer(config, target, store, workers)
        trainer.run(given.out, given.tensorboard)
    finally:
        workers.close()
    if workers.rank == 0:
        held_out = sorted({int(store.episodes[one]) for one in trainer.split.held_out})
        numbers = ",".join(map(str, held_out))
        sys.stdout.write(
            f"{given.out}: {trainer.config.steps} steps; held-out episodes {numbers}\n"
            f"next: deft train evaluate DATA --episodes {numbers} --head {given.out} "
            f"{target_flags(given)}\n"
        )
    return 0
