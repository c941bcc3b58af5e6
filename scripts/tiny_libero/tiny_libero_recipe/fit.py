"""Behaviour cloning of a small policy: the loop, resumable to the bit on one process."""

import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from deft_core.image_chain import ImageChain
from deft_draft_training.config import plain
from deft_draft_training.errors import DataError
from deft_draft_training.optimizer import OptimizerConfig, WeightAverage, computing_in
from deft_draft_training.run_directory import STATE_FILE, RunDirectory, read_state
from deft_draft_training.trainer import FitConfig, Net, Trainer, chosen_at
from deft_policies.checkpoint.config import CONFIG_FILE
from deft_policies.checkpoint.open import load_model, locate_checkpoint, open_source
from deft_policies.model.image import ImageProcessor
from deft_policies.model.sizes import OpenVLAConfig, TokenRange
from tiny_libero_recipe.data import (
    AnyBatch,
    AugmentConfig,
    Batches,
    PolicyBatch,
    PolicySamples,
    WordsConfig,
    augment,
)
from tiny_libero_recipe.model import (
    PolicyModelConfig,
    PolicyNet,
    count_layers,
    deepened,
    initialise,
)
from tiny_libero_recipe.tokenizer import words_of_thoughts


@dataclass(frozen=True)
class PolicyLossConfig:
    """Weights of the terms. `sigma_bins` 0 is plain cross-entropy."""

    sigma_bins: float = 2.0
    gripper_weight: float = 1.5
    position_weight: float = 1.0  # of the auxiliary regression of simulator positions
    text_weight: float = 0.5  # of a reasoning's words; its action has the rest


def soft_tokens(labels: Tensor, actions: TokenRange, vocabulary: int, sigma: float) -> Tensor:
    """Target distributions over the vocabulary, [row, dim, token], peaked at the labels.

    p(t) is proportional to exp(-(t - label)^2 / (2 sigma^2)) for action tokens and 0 for all
    others; sigma 0 gives one-hot rows. Neighbouring action tokens are neighbouring bins.
    """
    if sigma <= 0:
        return F.one_hot(labels, vocabulary).float()
    tokens = torch.arange(vocabulary, device=labels.device)
    scores = -0.5 * ((tokens - labels[..., None]) / sigma) ** 2
    return torch.softmax(scores.masked_fill(~actions.contains(tokens), -torch.inf), dim=-1)


def action_loss(
    logits: Tensor,
    labels: Tensor,
    sample_weight: Tensor,
    actions: TokenRange,
    config: PolicyLossConfig,
) -> Tensor:
    """Weighted cross-entropy. `logits` [row, dim, token], `labels` [row, dim], weights [row].

    The gripper, the last dimension, keeps its hard label: its two values are far apart and a
    neighbouring bin means nothing.
    """
    soft = soft_tokens(labels[:, :-1], actions, logits.shape[-1], config.sigma_bins)
    hard = F.one_hot(labels[:, -1:], logits.shape[-1]).float()
    losses = -(torch.cat([soft, hard], dim=1) * F.log_softmax(logits.float(), dim=-1)).sum(dim=-1)
    dims = torch.ones(losses.shape[1], device=losses.device)
    dims[-1] = config.gripper_weight
    weights = sample_weight[:, None] * dims
    return (losses * weights).sum() / weights.sum()


def text_loss(logits: Tensor, batch: PolicyBatch) -> Tensor:
    """Mean cross-entropy of an answer's tokens but its action's; `logits` [row, step, token]."""
    steps = torch.arange(batch.answers.shape[1], device=logits.device)
    since = steps - batch.first_actions[:, None]
    is_action = (since >= 0) & (since < batch.labels.shape[1])
    wanted = batch.answers.masked_fill(is_action, -1)
    return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), ignore_index=-1)


def position_loss(positions: Tensor, truth: Tensor, sample_weight: Tensor) -> Tensor:
    """Smooth L1 distance of the auxiliary head from the simulator's positions, [row, value]."""
    misses = F.smooth_l1_loss(positions.float(), truth, reduction="none", beta=0.1)
    return (misses.mean(dim=-1) * sample_weight).sum() / sample_weight.sum()


def spelling_loss(scores: Tensor, shares: Tensor, sample_weight: Tensor) -> Tensor:
    """Cross-entropy of log-probabilities [row, step, token] against shares of all tokens.

    A step counts by the sum of its shares, which is zero behind the end of an answer.
    """
    counted = shares.sum(dim=-1) * sample_weight[:, None]
    misses = -(shares * scores).sum(dim=-1) * sample_weight[:, None]
    return misses.sum() / counted.sum()


@dataclass(frozen=True)
class CloneConfig(FitConfig):
    """A training run that clones demonstrations."""

    augment: AugmentConfig = field(default_factory=AugmentConfig)
    words: WordsConfig = field(default_factory=WordsConfig)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            rate=1.5e-3, muon_rate=2e-3, clip=1.0, warm_up_steps=50, decay_from=0.4
        )
    )
    steps: int = 2000
    batch_size: int = 48
    average_decay: float = 0.998
    save_every: int = 200
    log_every: int = 20


class CloneTrainer(Trainer[Net], Generic[Net, AnyBatch]):
    """Everything one run needs, built once; `run` goes on from wherever the directory stands.

    Steps are of two kinds: the answers of `is_long` ones are longer, and the others stay short.
    """

    def __init__(
        self,
        config: CloneConfig,
        net: Net,
        samples: PolicySamples,
        device: torch.device | None = None,
    ) -> None:
        self.samples, self._clone = samples, config
        self.device = device or torch.device("cpu")
        super().__init__(config, net.to(self.device))

    @abstractmethod
    def _is_long(self, step: int) -> bool:
        """Of which kind a step is."""

    @abstractmethod
    def _take(
        self, chosen: NDArray[np.int64], generator: np.random.Generator, is_long: bool
    ) -> AnyBatch:
        """A step's samples."""

    @abstractmethod
    def _look(self, frames: Tensor) -> Tensor:
        """What the net is given of frames [row, height, width, 3], on its device."""

    @abstractmethod
    def _losses(self, pixels: Tensor, batch: AnyBatch, is_long: bool) -> dict[str, Tensor]:
        """The terms by name."""

    @abstractmethod
    def _weight(self, name: str, is_long: bool) -> float:
        """Of one of the terms."""

    def run(self, directory: Path, warm_start: Path | None = None, with_board: bool = False) -> Net:
        """Train to the configured step and return the averaged model.

        `warm_start` is another run's directory, or a checkpoint, whose weights a new run begins
        with: what DAgger does when more data have come. A run's decoder may have been shallower.
        """
        with RunDirectory(directory, plain(self._clone), with_board) as run:
            if warm_start is not None and not (directory / STATE_FILE).exists():
                self._begin_from(warm_start)
            return self._train(run)

    def _begin_from(self, directory: Path) -> None:
        weights = self._read_weights(directory)
        own = {name: one.shape for name, one in self.net.state_dict().items()}
        num_layers = count_layers(own)
        if count_layers(weights) < num_layers:
            weights = deepened(weights, num_layers)
        theirs = {name: one.shape for name, one in weights.items()}
        other = sorted(name for name, _ in own.items() ^ theirs.items())
        if other:
            raise DataError(f"{directory} is of another shape in {other[0]}; give the same sizes")
        self.net.load_state_dict(weights)
        self.average = WeightAverage(self.net, self._clone.average_decay)

    def _read_weights(self, directory: Path) -> Mapping[str, Tensor]:
        """Of a run."""
        path = directory / STATE_FILE
        if not path.exists():
            raise DataError(
                f"{path} is missing; a warm start needs the directory of a run, or a checkpoint"
            )
        weights: Mapping[str, Tensor] = read_state(path)["module"]
        return weights

    def _step(self, step: int) -> Mapping[str, float]:
        config, started_s = self._clone, time.perf_counter()
        chosen = chosen_at(len(self.samples), config.batch_size, config.seed, step)
        # Every step has random numbers of its own.
        seed = np.random.SeedSequence((config.seed, step))
        is_long = self._is_long(step)
        batch = self._take(chosen, np.random.default_rng(seed), is_long)
        frames = augment(
            batch.frames,
            config.augment,
            torch.Generator().manual_seed(int(seed.generate_state(1)[0])),
        )
        pixels = self._look(frames)
        with computing_in(config.precision, self.device):
            losses = self._losses(pixels, batch.to(self.device), is_long)
            weighted = [one * self._weight(name, is_long) for name, one in losses.items()]
            loss = torch.stack(weighted).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        with computing_in(config.precision, self.device):
            norm = self._update(step)
        return {
            "loss": float(loss.detach()),
            **{name: float(one.detach()) for name, one in losses.items()},
            "gradient_norm": norm,
            "samples_per_s": config.batch_size / (time.perf_counter() - started_s),
        }


@dataclass(frozen=True)
class PolicyFitConfig(CloneConfig):
    """A policy training run."""

    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    thinking_share: float = 1 / 3  # of the steps, whose samples think aloud
    # Every step thinks aloud and changes only words that thoughts alone have, so that acting at
    # once stays what it was: for a policy that acts well and thinks badly.
    only_thoughts: bool = False
    only_decided: bool = False  # leave out where the expert rises again: see `episodes.decided`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.only_thoughts and self.optimizer.weight_decay:
            raise ValueError(
                "with only_thoughts nothing else may change: set optimizer.weight_decay to 0"
            )
        if self.only_thoughts and not self.thinking_share:
            raise ValueError("with only_thoughts thinking_share must be above 0")


class PolicyTrainer(CloneTrainer[PolicyNet, PolicyBatch]):
    """Of OpenVLA's architecture: it acts at once, or thinks aloud first."""

    def __init__(
        self,
        config: PolicyFitConfig,
        model_config: OpenVLAConfig,
        samples: PolicySamples,
        tokenizer: Tokenizer,
        device: torch.device | None = None,
    ) -> None:
        if config.thinking_share and not all(samples.thoughts):
            raise DataError(
                "some demonstrations do not say what was asked for, so there is nothing to think "
                "aloud: record them again, or set fit.thinking_share to 0"
            )
        self.config = config
        net = PolicyNet(model_config, samples.positions.shape[1])
        initialise(net, config.seed)
        if config.only_thoughts:
            _train_only(net, words_of_thoughts(tokenizer))
        super().__init__(config, net, samples, device)
        self._batches = Batches(samples, tokenizer, model_config, config.words)
        self._images = ImageProcessor(model_config.image, ImageChain.NONE)
        self._actions = model_config.action_tokens

    def run(
        self, directory: Path, warm_start: Path | None = None, with_board: bool = False
    ) -> PolicyNet:
        """Train to the configured step and return the averaged model."""
        if self.config.only_thoughts and warm_start is None:
            raise DataError("only_thoughts needs a policy that acts well: give a warm start")
        return super().run(directory, warm_start, with_board)

    def _read_weights(self, directory: Path) -> Mapping[str, Tensor]:
        """Of a run or of a checkpoint, which has no auxiliary head: the new one stays."""
        if not (directory / CONFIG_FILE).exists() or (directory / STATE_FILE).exists():
            return super()._read_weights(directory)
        checkpoint = open_source(locate_checkpoint(str(directory)))
        model = load_model(checkpoint, torch.device("cpu"), torch.float32)
        kept = nn.ModuleDict({"model": model, "position_head": self.net.position_head})
        return kept.state_dict()

    def _is_long(self, step: int) -> bool:
        """Whether it thinks aloud."""
        share = 1.0 if self.config.only_thoughts else self.config.thinking_share
        return comes_at(step, share)

    def _take(
        self, chosen: NDArray[np.int64], generator: np.random.Generator, is_long: bool
    ) -> PolicyBatch:
        return self._batches.take(chosen, generator, is_long)

    def _look(self, frames: Tensor) -> Tensor:
        return self._images.pixel_values(list(frames.numpy()), self.device)

    def _losses(self, pixels: Tensor, batch: PolicyBatch, is_long: bool) -> dict[str, Tensor]:
        config, (rows, dims) = self.config.loss, batch.labels.shape
        hidden = self.net(pixels, batch.ids, batch.prompt_lengths, batch.answers.shape[1])
        output = self.net.read(hidden)
        steps = (batch.first_actions[:, None] + torch.arange(dims, device=self.device))[..., None]
        logits = output.logits.gather(1, steps.expand(rows, dims, output.logits.shape[-1]))
        losses = {
            "thinking_action" if is_long else "action": action_loss(
                logits, batch.labels, batch.weights, self._actions, config
            ),
            "positions": position_loss(output.positions, batch.positions, batch.weights),
        }
        return {**losses, "text": text_loss(output.logits, batch)} if is_long else losses

    def _weight(self, name: str, is_long: bool) -> float:
        """Of one of the losses: where it thinks aloud, its words have a share of the action's."""
        config = self.config.loss
        positions = 0.0 if self.config.only_thoughts else config.position_weight
        weights = {"positions": positions, "text": config.text_weight}
        return weights.get(name, 1 - config.text_weight if is_long else 1.0)


def _train_only(net: PolicyNet, ids: list[int]) -> None:
    """From now on these tokens' rows of the embedding and of the head are all that changes."""
    tables = (net.model.decoder.embedding.weight, net.model.decoder.head.weight)
    is_trained = torch.zeros(len(tables[0]), 1)
    is_trained[ids] = 1
    net.requires_grad_(False)
    for table in tables:
        table.requires_grad_(True)
        table.register_hook(lambda gradient: gradient * is_trained.to(gradient))  # type: ignore[no-untyped-call]


def comes_at(step: int, share: float) -> bool:
    """Whether a step is of the kind that a share of the steps is of, evenly spread."""
    return int((step + 1) * share + 1e-9) > int(step * share + 1e-9)
