"""From demonstrations to training samples: statistics, tokenizer, tokens, thoughts, weights."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deft_core.datasets.demonstrations import Demonstration
from deft_core.program import CommandParser
from deft_draft_training.config import load_config
from deft_draft_training.errors import ConfigError, DataError
from deft_policies.checkpoint.config import load_config as load_checkpoint_config
from deft_policies.checkpoint.config import load_tokenizer
from deft_policies.errors import PolicyError
from deft_policies.families.action_tokens import ActionCodec
from deft_policies.model.prompt import PromptTemplate
from deft_policies.model.sizes import OpenVLAConfig
from deft_policies.model.statistics import ActionStatistics
from tiny_libero_recipe.checkpoint_writer import write_checkpoint
from tiny_libero_recipe.data import PolicySamples
from tiny_libero_recipe.episodes import (
    auxiliary_positions,
    decided,
    load_demonstrations,
    request_of,
    step_weights,
    thoughts,
    training_notes,
)
from tiny_libero_recipe.fast_fit import FastFitConfig, FastTrainer
from tiny_libero_recipe.fast_samples import prepare_fast, write_fast
from tiny_libero_recipe.fit import PolicyFitConfig, PolicyTrainer
from tiny_libero_recipe.language import TAGS, vocabulary
from tiny_libero_recipe.model import PolicyModelConfig, PolicyNet, build_config
from tiny_libero_recipe.number_fit import NumberFitConfig, NumberTrainer
from tiny_libero_recipe.number_samples import prepare_numbers, write_numbers
from tiny_libero_recipe.tokenizer import build_tokenizer

_MOVING = 0.02  # of the largest command; less counts as standing still


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything a training run starts from."""

    config: OpenVLAConfig
    tokenizer: Tokenizer
    samples: PolicySamples


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """What the tokens of an earlier checkpoint mean, in its actions and in its prompts."""

    statistics: ActionStatistics
    tokenizer: Tokenizer


def prepare(
    episodes: Sequence[Demonstration],
    sizes: PolicyModelConfig,
    statistics_key: str,
    kept: KeptTokens | None = None,
    thinking_share: float = 0.0,
) -> Prepared:
    """Build samples. Statistics and tokenizer are made of these episodes unless some are kept.

    A run that begins with another's weights must keep both: tokens mean what they mean. Words that
    the tokenizer has not seen fall back to its smaller pieces.
    """
    if not episodes:
        raise DataError("none of the demonstrations succeeded; nothing to train on")
    notes = training_notes(episodes)
    statistics = kept.statistics if kept else measure_statistics(episodes)
    tokenizer = (
        kept.tokenizer if kept else build_tokenizer((*notes.instructions, *vocabulary()), TAGS)
    )
    taught = {PromptTemplate.OPENVLA: 1 - thinking_share, PromptTemplate.ECOT: thinking_share}
    prompts = tuple(prompt.value for prompt, share in taught.items() if share > 0)
    config = replace(
        build_config(sizes, tokenizer.get_vocab_size(), {statistics_key: statistics}),
        training=replace(notes, prompts=prompts),
    )
    samples = PolicySamples.join(_samples(one, config, statistics) for one in episodes)
    return Prepared(config, tokenizer, samples)


def measure_statistics(episodes: Iterable[Demonstration]) -> ActionStatistics:
    """1st and 99th percentile of each dimension; the gripper, the last, keeps its own values."""
    rows = [one.labels.astype(np.float64) for one in episodes]
    labels = np.concatenate(rows)
    mask = np.ones(labels.shape[1], dtype=np.bool_)
    mask[-1] = False
    return ActionStatistics(
        low=np.quantile(labels, 0.01, axis=0),
        high=np.quantile(labels, 0.99, axis=0),
        mask=mask,
        mean=labels.mean(axis=0),
        std=labels.std(axis=0),
        minimum=labels.min(axis=0),
        maximum=labels.max(axis=0),
        num_transitions=len(labels),
        num_trajectories=len(rows),
    )


def entropy_of_motion(
    tokens: NDArray[np.int64], labels: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Bits of entropy of each direction's tokens, over the steps that move that way.

    Both are [step, dim]; the gripper, the last dimension, is left out.
    """
    bits = []
    for dim in range(labels.shape[1] - 1):
        moving = tokens[np.abs(labels[:, dim]) > _MOVING, dim]
        _, counts = np.unique(moving, return_counts=True)
        shares = counts / max(len(moving), 1)
        bits.append(-float((shares * np.log2(shares)).sum()))
    return np.array(bits)


def _spoken_bits(episodes: Sequence[Demonstration], prepared: Prepared) -> str:
    labels = np.concatenate([one.labels for one in episodes])
    bits = entropy_of_motion(prepared.samples.labels, labels)
    names = ("x", "y", "z", "roll", "pitch", "yaw")
    return ", ".join(f"{name} {one:.2f}" for name, one in zip(names, bits, strict=False))


def _samples(
    episode: Demonstration, config: OpenVLAConfig, statistics: ActionStatistics
) -> PolicySamples:
    codec = ActionCodec(config.action_tokens)
    request = request_of(episode)
    return PolicySamples(
        encoded=episode.encoded,
        labels=codec.encode(episode.labels.astype(np.float64), statistics),
        positions=auxiliary_positions(episode),
        weights=step_weights(episode),
        requests=[request] * len(episode),
        thoughts=thoughts(episode) if request.thing else [""] * len(episode),
    )


@dataclass(frozen=True)
class NumberRunConfig:
    """A run of a policy that writes numbers."""

    fit: NumberFitConfig = field(default_factory=NumberFitConfig)


@dataclass(frozen=True)
class FastRunConfig:
    """A run of a policy that writes FAST codes."""

    fit: FastFitConfig = field(default_factory=FastFitConfig)


@dataclass(frozen=True)
class PolicyRunConfig:
    """A run: the data set's name and the training itself."""

    statistics_key: str = "libero_object"
    fit: PolicyFitConfig = field(default_factory=PolicyFitConfig)


def main(arguments: list[str]) -> int:
    """Train, or go on training, and write the checkpoint at the end."""
    parser = CommandParser(prog="python -m tiny_libero_recipe train", description=__doc__)
    parser.add_argument("demos", nargs="+", type=Path, help="folders of demonstrations")
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new checkpoint")
    parser.add_argument(
        "--answers",
        choices=("actions", "numbers", "fast"),
        default="actions",
        help="a token of each dimension, as OpenVLA, numbers in text, as VLA-0, or FAST codes, as "
        "pi0-FAST [%(default)s]",
    )
    parser.add_argument("--config", type=Path, metavar="TOML")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument(
        "--warm-start",
        type=Path,
        metavar="DIR",
        help="begin with the weights of another run, or of a checkpoint",
    )
    parser.add_argument(
        "--tokens-of",
        type=Path,
        metavar="DIR",
        help="checkpoint whose statistics and tokenizer to keep",
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="[%(default)s]"
    )
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--tensorboard", action="store_true", help="show losses there, too")
    parser.add_argument("--float32", action="store_true", help="store float32, not bfloat16")
    given = parser.parse_args(arguments)
    if given.out.exists():
        raise ConfigError(f"{given.out} exists; checkpoints are never overwritten")
    if given.warm_start and not given.tokens_of:
        raise ConfigError(
            "a warm start keeps what tokens mean: give --tokens-of the checkpoint of that run"
        )
    if given.threads:
        torch.set_num_threads(given.threads)
    if given.answers == "numbers":
        _train_numbers(given)
    elif given.answers == "fast":
        _train_fast(given)
    else:
        _train_policy(given)
    return 0


def _train_policy(given: argparse.Namespace) -> None:
    """Of OpenVLA's architecture."""
    config = load_config(PolicyRunConfig, given.config, given.overrides)
    kept = _kept_tokens(given.tokens_of, config.statistics_key)
    episodes = load_demonstrations(given.demos, only_succeeded=given.warm_start is None)
    if config.fit.only_decided:
        episodes = [decided(one) for one in episodes]
    fit = config.fit
    prepared = prepare(episodes, fit.model, config.statistics_key, kept, fit.thinking_share)
    sys.stderr.write(
        f"{len(episodes)} episodes, {len(prepared.samples)} frames, "
        f"{len(prepared.config.training.instructions)} instructions\n"
        f"bits of entropy in what moves, by direction: {_spoken_bits(episodes, prepared)}\n"
    )
    trainer = PolicyTrainer(
        config.fit,
        prepared.config,
        prepared.samples,
        prepared.tokenizer,
        torch.device(given.device),
    )
    net = trainer.run(given.run, given.warm_start, given.tensorboard)
    write_policy(net, prepared, given.out, _dtype(given))
    key = config.statistics_key
    sys.stdout.write(
        f"{given.out}: {config.fit.steps} steps\n"
        f"next: deft serve --checkpoint {quote(str(given.out))} --statistics-key {key}\n"
    )


def _train_numbers(given: argparse.Namespace) -> None:
    """Of VLA-0's architecture."""
    config = load_config(NumberRunConfig, given.config, given.overrides)
    episodes = load_demonstrations(given.demos, only_succeeded=given.warm_start is None)
    prepared = prepare_numbers(episodes, given.tokens_of)
    repeated = ", ".join(f"{100 * one:.1f}" for one in prepared.repeated)
    sys.stderr.write(
        f"{len(episodes)} episodes, {len(prepared.samples)} frames\n"
        f"of 100 numbers so many are the same in the next frame, by dimension: {repeated}; "
        f"of all {100 * prepared.repeated.mean():.1f}\n"
    )
    device = torch.device(given.device)
    trainer = NumberTrainer(config.fit, prepared.run, prepared.samples, prepared.tokenizer, device)
    net = trainer.run(given.run, given.warm_start, given.tensorboard)
    write_numbers(net, prepared, given.out, _dtype(given))
    sys.stdout.write(
        f"{given.out}: {config.fit.steps} steps\n"
        f"next: deft serve --family vla0 --checkpoint {quote(str(given.out))}\n"
    )


def _train_fast(given: argparse.Namespace) -> None:
    """Of pi0-FAST's architecture."""
    config = load_config(FastRunConfig, given.config, given.overrides)
    episodes = load_demonstrations(given.demos, only_succeeded=given.warm_start is None)
    prepared = prepare_fast(episodes, config.fit.num_codes, given.tokens_of)
    trainer = FastTrainer(config.fit, prepared, torch.device(given.device))
    num_weights = sum(one.numel() for one in trainer.net.network.parameters())
    sys.stderr.write(
        f"{len(episodes)} episodes, {len(prepared.samples)} frames\n"
        f"{len(prepared.format.codec.pieces)} codes, {prepared.mean_codes:.1f} an answer; "
        f"{num_weights / 1e6:.1f} million weights\n"
    )
    net = trainer.run(given.run, given.warm_start, given.tensorboard)
    write_fast(net, prepared, given.out, _dtype(given))
    sys.stdout.write(
        f"{given.out}: {config.fit.steps} steps\n"
        f"next: deft serve --family pi0fast --checkpoint {quote(str(given.out))}\n"
    )


def _dtype(given: argparse.Namespace) -> torch.dtype:
    """Of the weights that are stored."""
    return torch.float32 if given.float32 else torch.bfloat16


def write_policy(net: PolicyNet, prepared: Prepared, directory: Path, dtype: torch.dtype) -> None:
    """Write what inference uses; the auxiliary head stays behind."""
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in net.model.named_tensors().items()
    }
    write_checkpoint(directory, prepared.config, tensors, prepared.tokenizer)


def _kept_tokens(checkpoint: Path | None, key: str) -> KeptTokens | None:
    if checkpoint is None:
        return None
    try:
        config = load_checkpoint_config(checkpoint)
        tokenizer = load_tokenizer(checkpoint)
    except PolicyError as error:
        raise DataError(str(error)) from error
    if key not in config.statistics:
        known = ", ".join(config.statistics)
        raise DataError(f"{checkpoint} has no statistics {key!r}; it has {known}")
    return KeptTokens(config.statistics[key], tokenizer)
