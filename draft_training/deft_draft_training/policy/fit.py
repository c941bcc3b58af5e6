"""Behaviour cloning of a small policy: the loop, resumable to the bit on one process."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows it by)
from torch import Tensor

from deft_client.image_chain import ImageChain
from deft_draft_training.config import plain
from deft_draft_training.errors import DataError
from deft_draft_training.optimizer import OptimizerConfig, WeightAverage, computing_in
from deft_draft_training.policy.data import (
    AugmentConfig,
    PolicyBatch,
    PolicySamples,
    PromptTable,
    augment,
    chosen_at,
    take,
)
from deft_draft_training.policy.growth import count_layers, deepened
from deft_draft_training.policy.model import PolicyModelConfig, PolicyNet, initialise
from deft_draft_training.run_directory import STATE_FILE, RunDirectory
from deft_draft_training.trainer import FitConfig, Trainer
from deft_policies.decoding.tree import TokenRange
from deft_policies.model.image import ImageProcessor
from deft_policies.model.sizes import OpenVLAConfig
from deft_policies.openvla.action_codec import ActionCodec


@dataclass(frozen=True)
class PolicyLossConfig:
    """Weights of the terms. `sigma_bins` 0 is plain cross-entropy.

    `label_step` above 1 teaches every so many bins only. A small policy cannot tell neighbouring
    bins apart; where it has to choose among few, its choice is clear, and a draft can guess it.
    """

    sigma_bins: float = 2.0
    label_step: int = 1
    gripper_weight: float = 1.5
    position_weight: float = 1.0  # of the auxiliary regression of simulator positions


def taught_tokens(actions: TokenRange, still: Tensor, vocabulary: int, step: int) -> Tensor:
    """Which tokens labels may be, [dim, token]: every `step`-th action token and both ends.

    They are counted from `still`, [dim], the tokens that move nothing: with few bins to choose
    from, too, a policy must be able to stay where it is. The gripper, the last, keeps all its bins.
    """
    tokens = torch.arange(vocabulary, device=still.device)
    is_taught = ((tokens - still[:, None]) % step == 0) | (tokens == actions.first)
    is_taught |= tokens == actions.last
    is_taught[-1] = True
    return is_taught & actions.contains(tokens)


def nearest_taught(labels: Tensor, is_taught: Tensor) -> Tensor:
    """Labels, [row, dim], moved to the nearest tokens that are taught."""
    tokens = torch.arange(is_taught.shape[1], device=labels.device)
    distances = (tokens - labels[..., None]).abs()
    return distances.masked_fill(~is_taught, len(tokens)).argmin(dim=-1)


def soft_tokens(labels: Tensor, is_taught: Tensor, sigma: float) -> Tensor:
    """Target distributions over the vocabulary, [row, dim, token], peaked at the labels.

    p(t) is proportional to exp(-(t - label)^2 / (2 sigma^2)) for taught tokens and 0 for all
    others; sigma 0 gives one-hot rows. Neighbouring action tokens are neighbouring bins.
    """
    vocabulary = is_taught.shape[1]
    if sigma <= 0:
        return F.one_hot(labels, vocabulary).float()
    tokens = torch.arange(vocabulary, device=labels.device)
    scores = -0.5 * ((tokens - labels[..., None]) / sigma) ** 2
    return torch.softmax(scores.masked_fill(~is_taught, -torch.inf), dim=-1)


def token_loss(
    logits: Tensor,
    labels: Tensor,
    sample_weight: Tensor,
    is_taught: Tensor,
    config: PolicyLossConfig,
) -> Tensor:
    """Weighted cross-entropy. `logits` [row, dim, token], `labels` [row, dim], weights [row].

    The gripper, the last dimension, keeps its hard label: its two values are far apart and a
    neighbouring bin means nothing.
    """
    soft = soft_tokens(labels[:, :-1], is_taught[:-1], config.sigma_bins)
    hard = F.one_hot(labels[:, -1:], logits.shape[-1]).float()
    losses = -(torch.cat([soft, hard], dim=1) * F.log_softmax(logits.float(), dim=-1)).sum(dim=-1)
    dims = torch.ones(losses.shape[1], device=losses.device)
    dims[-1] = config.gripper_weight
    weights = sample_weight[:, None] * dims
    return (losses * weights).sum() / weights.sum()


def position_loss(positions: Tensor, truth: Tensor, sample_weight: Tensor) -> Tensor:
    """Smooth L1 distance of the auxiliary head from the simulator's positions, [row, value]."""
    misses = F.smooth_l1_loss(positions.float(), truth, reduction="none", beta=0.1)
    return (misses.mean(dim=-1) * sample_weight).sum() / sample_weight.sum()


@dataclass(frozen=True)
class PolicyFitConfig(FitConfig):
    """A policy training run."""

    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
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


class PolicyTrainer(Trainer[PolicyNet]):
    """Everything one run needs, built once; `run` goes on from wherever the directory stands."""

    def __init__(
        self,
        config: PolicyFitConfig,
        model_config: OpenVLAConfig,
        samples: PolicySamples,
        prompts: PromptTable,
        device: torch.device | None = None,
    ) -> None:
        self.config, self.samples, self.prompts = config, samples, prompts
        self.device = device or torch.device("cpu")
        net = PolicyNet(model_config, samples.positions.shape[1])
        initialise(net, config.seed)
        super().__init__(config, net.to(self.device))
        self._images = ImageProcessor(model_config.image, ImageChain.NONE)
        self._taught = _taught_tokens(model_config, config.loss.label_step).to(self.device)

    def run(
        self, directory: Path, warm_start: Path | None = None, with_board: bool = False
    ) -> PolicyNet:
        """Train to the configured step and return the averaged model.

        `warm_start` is another run's directory whose weights a new run begins with: what DAgger
        does when more data have come. Its decoder may have been shallower.
        """
        run = RunDirectory(directory, plain(self.config), with_board)
        if warm_start is not None and not (directory / STATE_FILE).exists():
            self._begin_from(warm_start)
        return self._train(run)

    def _begin_from(self, directory: Path) -> None:
        path = directory / STATE_FILE
        if not path.exists():
            raise DataError(f"{path} is missing; a warm start needs the directory of a run")
        weights = torch.load(path, map_location="cpu", weights_only=True)["module"]
        if count_layers(weights) < self.config.model.num_layers:
            weights = deepened(weights, self.config.model.num_layers)
        own = {name: one.shape for name, one in self.net.state_dict().items()}
        theirs = {name: one.shape for name, one in weights.items()}
        other = sorted(name for name, _ in own.items() ^ theirs.items())
        if other:
            raise DataError(f"{path} is of another shape in {other[0]}; give the same sizes")
        self.net.load_state_dict(weights)
        self.average = WeightAverage(self.net, self.config.average_decay)

    def _step(self, step: int) -> Mapping[str, float]:
        config, started_s = self.config, time.perf_counter()
        chosen = chosen_at(len(self.samples), config.batch_size, config.seed, step)
        batch = take(self.samples, self.prompts, chosen)
        with computing_in(config.precision, self.device):
            tokens, positions = self._losses(batch, step)
        loss = tokens + config.loss.position_weight * positions
        loss.backward()  # type: ignore[no-untyped-call]
        with computing_in(config.precision, self.device):
            norm = self._update(step)
        return {
            "loss": float(loss.detach()),
            "tokens": float(tokens.detach()),
            "positions": float(positions.detach()),
            "gradient_norm": norm,
            "samples_per_s": config.batch_size / (time.perf_counter() - started_s),
        }

    def _losses(self, batch: PolicyBatch, step: int) -> tuple[Tensor, Tensor]:
        # A 63-bit mix of seed and step: every step has a generator of its own.
        seed = np.random.SeedSequence((self.config.seed, step)).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(seed))
        frames = augment(batch.frames, self.config.augment, generator)
        pixels = self._images.pixel_values(list(frames.numpy()), self.device)
        batch = batch.to(self.device)
        labels = nearest_taught(batch.labels, self._taught)
        output = self.net.read(self.net(pixels, batch.prompts, batch.lengths, labels))
        tokens = token_loss(output.logits, labels, batch.weights, self._taught, self.config.loss)
        return tokens, position_loss(output.positions, batch.positions, batch.weights)


def _taught_tokens(config: OpenVLAConfig, step: int) -> Tensor:
    (statistics,) = config.statistics.values()
    nothing = np.zeros(len(statistics.q01))
    still = torch.from_numpy(ActionCodec(config.vocabulary).encode(nothing, statistics))
    return taught_tokens(config.vocabulary.tokens, still, config.llm.vocab_size, step)
