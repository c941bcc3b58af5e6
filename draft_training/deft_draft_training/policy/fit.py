"""Behaviour cloning of a small policy: the loop, resumable to the bit on one process."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from deft_client.image_chain import ImageChain
from deft_draft_training.averaging import WeightAverage
from deft_draft_training.config import plain
from deft_draft_training.errors import DataError
from deft_draft_training.optimizer import (
    OptimizerConfig,
    build_optimizers,
    clip_gradients,
    set_rate,
)
from deft_draft_training.policy.augment import AugmentConfig, augment
from deft_draft_training.policy.data import PolicyBatch, PolicySamples, PromptTable, chosen_at, take
from deft_draft_training.policy.growth import count_layers, deepened
from deft_draft_training.policy.loss import (
    PolicyLossConfig,
    nearest_taught,
    position_loss,
    taught_tokens,
    token_loss,
)
from deft_draft_training.policy.model import PolicyModelConfig, PolicyNet, initialise
from deft_draft_training.precision import TrainingPrecision, computing_in
from deft_draft_training.run_directory import STATE_FILE, Progress, RunDirectory
from deft_policies.openvla.action_codec import ActionCodec
from deft_policies.openvla.config import OpenVLAConfig
from deft_policies.openvla.image import ImageProcessor


@dataclass(frozen=True)
class PolicyFitConfig:
    """A policy training run."""

    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            rate=1.5e-3, muon_rate=2e-3, clip=1.0, warm_up_steps=50, decay_from=0.4
        )
    )
    precision: TrainingPrecision = TrainingPrecision.FLOAT32
    steps: int = 2000
    batch_size: int = 48
    average_decay: float = 0.998
    save_every: int = 200
    log_every: int = 20
    seed: int = 0


class PolicyTrainer:
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
        self.net = PolicyNet(model_config, samples.positions.shape[1])
        initialise(self.net, config.seed)
        self.device = device or torch.device("cpu")
        self.net.to(self.device)
        self.optimizers = build_optimizers(self.net, config.optimizer)
        self.average = WeightAverage(self.net, config.average_decay)
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
        progress, extra = run.load(self.net, self.optimizers)
        if progress.step == 0 and warm_start is not None:
            self._begin_from(warm_start)
        self.average.restore(extra)
        started, seen = time.perf_counter(), progress.samples
        steps = range(progress.step, self.config.steps)
        for step in tqdm(steps, initial=progress.step, total=self.config.steps, file=sys.stderr):
            losses = self._step(step)
            seen += self.config.batch_size
            done = step + 1
            if done % self.config.log_every == 0:
                rate = (seen - progress.samples) / (time.perf_counter() - started)
                run.log(done, {**losses, "samples_per_s": rate})
            if done % self.config.save_every == 0 or done == self.config.steps:
                run.save(Progress(done, seen), self.net, self.optimizers, self.average.state())
        self.average.copy_to(self.net)
        return self.net

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
        config = self.config
        chosen = chosen_at(len(self.samples), config.batch_size, config.seed, step)
        batch = take(self.samples, self.prompts, chosen)
        set_rate(self.optimizers, config.optimizer, step, config.steps)
        with computing_in(config.precision, self.device):
            tokens, positions = self._losses(batch, step)
        loss = tokens + config.loss.position_weight * positions
        loss.backward()  # type: ignore[no-untyped-call]
        norm = clip_gradients(self.net, config.optimizer.clip)
        for optimizer in self.optimizers:
            with computing_in(config.precision, self.device):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.average.follow(self.net)
        return {
            "loss": float(loss.detach()),
            "tokens": float(tokens.detach()),
            "positions": float(positions.detach()),
            "gradient_norm": norm,
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
