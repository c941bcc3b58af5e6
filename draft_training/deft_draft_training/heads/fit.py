"""Fits a draft head to a target: the loop, for one process or several under torchrun.

On one process a killed run resumes to the bit: what a step sees and how it is disturbed are
functions of the seed and the step's number. Several processes share each batch, so that two
processes with half the batch each take the steps that one takes with all of it.
"""

import pickle
import sys
import tempfile
import weakref
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from shlex import quote

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deft_core.datasets.flags import read_cameras
from deft_draft_training.commands.fit import EPOCHS, PUBLISHED_STEPS
from deft_draft_training.config import load_config, plain
from deft_draft_training.errors import DataError
from deft_draft_training.heads.block_loss import BlockLossConfig, block_losses
from deft_draft_training.heads.index import read_index
from deft_draft_training.heads.loss import HeadLossConfig, head_losses, medusa_losses
from deft_draft_training.heads.record import Sample, iterate_shards
from deft_draft_training.heads.samples import EpisodeSource, HeadSample, collate
from deft_draft_training.heads.states import StatesSample, collate_blocks
from deft_draft_training.heads.target import FeatureTarget, load_target
from deft_draft_training.optimizer import computing_in
from deft_draft_training.run_directory import RunDirectory, explained
from deft_draft_training.trainer import FitConfig, Trainer, Workers, chosen_at
from deft_policies.commands.parse import target_flags
from deft_policies.model.block_head import BlockHead, block_sizes
from deft_policies.model.draft_heads import EagleHead, MedusaHeads, head_sizes
from deft_policies.model.sizes import TokenRange
from deft_policies.progress import shown

DraftHead = EagleHead | MedusaHeads | BlockHead


class HeadKind(Enum):
    """What is fitted."""

    EAGLE = "eagle"
    MEDUSA = "medusa"
    BLOCK = "block"


@dataclass(frozen=True)
class BlockConfig:
    """A block head, where that is fitted."""

    places: int = 7  # tokens that it drafts
    layers: int = 1  # of its backbone
    rank: int = 0  # of its Markov head; 0: 256, or half of the target's width
    blocks: int = 16  # that are drawn of each answer in a step, at most one behind each token
    whole_vocabulary: bool = False  # draft every token, as texts need, rather than action tokens
    loss: BlockLossConfig = field(default_factory=BlockLossConfig)


@dataclass(frozen=True)
class HeadFitConfig(FitConfig):
    """A head's training run. Defaults are the published ones where there are any."""

    steps: int = 0  # 0: EPOCHS over the samples, at most PUBLISHED_STEPS
    kind: HeadKind = HeadKind.EAGLE
    heads: int = 0  # attention heads (EAGLE; 0: as the target) or parallel heads (Medusa; 0: 6)
    mlp_width: int = 0  # 0: as the target
    loss: HeadLossConfig = field(default_factory=HeadLossConfig)
    block: BlockConfig = field(default_factory=BlockConfig)
    held_out_share: float = 0.05


class RecordedSamples:
    """Samples of a folder of shards, read from there when they are used."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        shards = iterate_shards(folder, fingerprint)
        self.layers = read_index(folder).layers
        self._samples = [sample for shard in shards for sample in shard]
        if not self._samples:
            raise DataError(f"{folder} holds no samples; run `deft train record` into it")
        self.episodes = np.array([sample.episode for sample in self._samples])

    def get(self, numbers: Sequence[int]) -> list[Sample]:
        """The named samples."""
        return [self._samples[number] for number in numbers]


class LiveSamples:
    """Samples computed when they are asked for: the target runs along.

    Decoded frames may be more than memory holds. They lie in a temporary file without a name.
    """

    layers: tuple[int, ...] = ()  # whose states they have; block heads alone need them

    def __init__(self, target: FeatureTarget, source: EpisodeSource) -> None:
        self._target = target
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        weakref.finalize(self, self._file.close)
        self._places: list[int] = []
        episodes: list[int] = []
        with explained(Path(tempfile.gettempdir())):
            for episode, observation in source.observations():
                self._places.append(self._file.tell())
                pickle.dump(observation, self._file)
                episodes.append(episode)
        self.episodes = np.array(episodes)

    def get(self, numbers: Sequence[int]) -> list[Sample]:
        """The named samples, freshly computed."""
        observations = []
        for number in numbers:
            self._file.seek(self._places[number])
            observations.append(pickle.load(self._file))
        episodes = [int(self.episodes[number]) for number in numbers]
        return [*self._target.sample(observations, episodes, torch.float32)]


SampleStore = RecordedSamples | LiveSamples


def split_by_episode(
    episodes: NDArray[np.int64], held_out_share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of the samples to train on, and of those held out: whole episodes, at least one."""
    names = np.unique(episodes)
    if len(names) < 2:
        raise DataError(f"a split needs at least two episodes, got {len(names)}")
    number = min(max(1, round(held_out_share * len(names))), len(names) - 1)
    chosen = np.random.default_rng(seed).permutation(names)[:number]
    is_held_out = np.isin(episodes, chosen)
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


class HeadTrainer(Trainer[DraftHead]):
    """Everything one run needs, built once; `run` goes on from the last checkpoint."""

    def __init__(
        self,
        config: HeadFitConfig,
        target: FeatureTarget,
        store: SampleStore,
        workers: Workers | None = None,
    ) -> None:
        self.target, self.store = target, store
        self.workers = workers or Workers()
        self.numbers, self.held_out = split_by_episode(
            store.episodes, config.held_out_share, config.seed
        )
        config = self.config = choose_steps(config, len(self.numbers))
        if (config.kind is HeadKind.BLOCK) != bool(store.layers):
            raise DataError(
                "a block head, and no other, learns from features with the states of several "
                "layers: `deft train record --layers 1,2 ...`, then `deft train fit --features`"
            )
        head = build_head(config, target, store.layers)
        super().__init__(config, head.to(target.weight.device))

    def run(self, directory: Path, with_board: bool = False) -> nn.Module:
        """Train to the configured step and return the (averaged) head."""
        described = {**plain(self.config), "target": self.target.fingerprint()}
        if self.config.kind is HeadKind.BLOCK:
            described["layers"] = list(self.store.layers)
        else:
            del described["block"]  # which runs from before there were block heads do not have
        with RunDirectory(directory, described, with_board, self.workers.rank == 0) as run:
            run.keep_split(*(self.episodes_of(share) for share in (self.numbers, self.held_out)))
            return self._train(run)

    def episodes_of(self, numbers: NDArray[np.int64]) -> list[int]:
        """The episodes of some samples, in order."""
        return sorted({int(self.store.episodes[number]) for number in numbers})

    def _step(self, step: int) -> dict[str, float]:
        config = self.config
        chosen = chosen_at(len(self.numbers), config.batch_size, config.seed, step)
        own = self.numbers[self.workers.share(chosen)]
        samples = self.store.get([int(number) for number in own])
        with computing_in(config.precision, self.target.weight.device):
            parts = self._losses(samples, step)
        parts["loss"].backward()  # type: ignore[no-untyped-call]
        self.workers.average_gradients(self.net)
        norm = self._update(step)
        values = {name: float(value.detach()) for name, value in parts.items()}
        return {**self.workers.average(values), "gradient_norm": norm}

    def _losses(self, samples: Sequence[Sample], step: int) -> dict[str, Tensor]:
        own = self.workers.share(np.arange(self.config.batch_size))
        seeds = [self._seed(step, int(index)) for index in own]
        if isinstance(self.net, BlockHead):
            return self._block_losses(self.net, samples, seeds)
        batch = collate(
            [sample for sample in samples if isinstance(sample, HeadSample)], self.target.table
        )
        if isinstance(self.net, MedusaHeads):
            states = self.net(batch.at_guesses(batch.hidden))
            actions = self.target.actions
            return {"loss": medusa_losses(states, self.target.logits, batch.tokens, actions)}
        config, target = self.config.loss, self.target
        logits = target.every_logit if config.whole_vocabulary else target.logits
        return head_losses(self.net, logits, batch, config, seeds)

    def _block_losses(
        self, head: BlockHead, samples: Sequence[Sample], seeds: Sequence[int]
    ) -> dict[str, Tensor]:
        config, target = self.config.block, self.target
        batch = collate_blocks(
            [sample for sample in samples if isinstance(sample, StatesSample)],
            head.sizes.places,
            config.blocks,
            seeds,
            target.weight.device,
        )
        logits = target.every_logit if config.whole_vocabulary else target.logits
        return block_losses(head, target.embed, logits, batch, config.loss)

    def _seed(self, step: int, index: int) -> int:
        """Of the noise on one sample of one step, whichever process has it."""
        mixed = np.random.SeedSequence((self.config.seed, step, index))
        return int(mixed.generate_state(1)[0])


def choose_steps(config: HeadFitConfig, num_samples: int) -> HeadFitConfig:
    """Where no number of steps is given: by the samples, a tenth of them at most for warming up."""
    if config.steps:
        return config
    steps = min(EPOCHS * max(1, num_samples // config.batch_size), PUBLISHED_STEPS)
    warm_up_steps = min(config.optimizer.warm_up_steps, steps // 10)
    optimizer = replace(config.optimizer, warm_up_steps=warm_up_steps)
    return replace(config, steps=steps, optimizer=optimizer)


def build_head(
    config: HeadFitConfig, target: FeatureTarget, layers: Sequence[int] = ()
) -> DraftHead:
    """A fresh head of the target's width, the same for the same seed.

    A block head reads the target's states behind `layers`.
    """
    torch.manual_seed(config.seed)
    llm = target.policy.model.network.config.llm
    if config.kind is HeadKind.MEDUSA:
        return MedusaHeads(llm.width, config.heads or 6)
    if config.kind is HeadKind.BLOCK:
        return _build_block(config, target, layers)
    sizes = head_sizes(
        width=llm.width,
        mlp_width=config.mlp_width or llm.mlp_width,
        num_heads=config.heads or llm.num_heads,
        num_kv_heads=config.heads or llm.num_kv_heads,
        norm_eps=llm.norm_eps,
        rope_theta=llm.rope_theta,
    )
    return EagleHead(sizes)


def _build_block(config: HeadFitConfig, target: FeatureTarget, layers: Sequence[int]) -> BlockHead:
    """Places begin as nothing, and the Markov head says nothing yet."""
    block, llm = config.block, target.policy.model.target.decoder.sizes
    all_tokens = TokenRange(0, llm.vocabulary - 1)
    head = BlockHead(
        block_sizes(
            llm,
            all_tokens if block.whole_vocabulary else target.actions,
            layers,
            places=block.places,
            num_layers=block.layers,
            mlp_width=config.mlp_width,
            rank=block.rank,
        )
    )
    nn.init.normal_(head.further, std=0.02)
    nn.init.zeros_(head.markov.weight)
    return head


def run(flags: Namespace) -> int:
    """Train, or go on training, in a run directory."""
    config = load_config(HeadFitConfig, flags.config, flags.overrides)
    with Workers.from_torchrun() as workers:  # first: it says which GPU is this process's
        with shown():
            target = load_target(flags)
        store: SampleStore
        if flags.features is not None:
            store = RecordedSamples(flags.features, target.fingerprint())
        else:
            episodes = EpisodeSource(tuple(flags.live), flags.stride, read_cameras(flags))
            store = LiveSamples(target, episodes)
        trainer = HeadTrainer(config, target, store, workers)
        trainer.run(flags.out, flags.tensorboard)
    if workers.rank == 0:
        numbers = ",".join(map(str, trainer.episodes_of(trainer.held_out)))
        sys.stdout.write(
            f"{flags.out}: {trainer.config.steps} steps; held-out episodes {numbers}\n"
            f"next: deft train evaluate DATA --episodes {numbers} "
            f"--head {quote(str(flags.out))} {target_flags(flags)}\n"
        )
    return 0
