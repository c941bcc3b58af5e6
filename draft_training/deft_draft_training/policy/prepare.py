"""From labelled episodes to training samples: statistics, tokenizer, tokens and weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deft_draft_training.errors import DataError
from deft_draft_training.policy.collect import weight
from deft_draft_training.policy.data import PolicySamples, PromptTable
from deft_draft_training.policy.episodes import LabelledEpisode
from deft_draft_training.policy.model import PolicyModelConfig, build_config
from deft_policies.openvla.action_codec import ActionCodec
from deft_policies.openvla.checkpoint_tokenizer import build_tokenizer
from deft_policies.openvla.config import OpenVLAConfig
from deft_policies.openvla.prompt import PromptEncoder
from deft_policies.openvla.statistics import ActionStatistics


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything a training run starts from."""

    config: OpenVLAConfig
    tokenizer: Tokenizer
    samples: PolicySamples
    prompts: PromptTable
    instructions: tuple[str, ...]


def prepare(
    episodes: Sequence[LabelledEpisode],
    sizes: PolicyModelConfig,
    statistics_key: str,
    statistics: ActionStatistics | None = None,
) -> Prepared:
    """Build samples. Without given statistics they are taken from these episodes.

    Later rounds of DAgger must pass the first round's statistics: tokens mean what they mean.
    """
    if not episodes:
        raise DataError("there are no episodes to train on; run `deft train policy collect` first")
    instructions = tuple(sorted({one.instruction for one in episodes}))
    labels = np.concatenate([one.labels for one in episodes])
    statistics = statistics or measure_statistics(labels, len(episodes))
    tokenizer = build_tokenizer(instructions)
    config = build_config(sizes, tokenizer.get_vocab_size(), {statistics_key: statistics})
    encoder = PromptEncoder(tokenizer, config.prompt_template, Path("the tokenizer made here"))
    prompts = PromptTable([encoder.encode(one) for one in instructions])
    return Prepared(
        config,
        tokenizer,
        _samples(episodes, instructions, config, statistics),
        prompts,
        instructions,
    )


def measure_statistics(labels: NDArray[np.float64], num_episodes: int) -> ActionStatistics:
    """1st and 99th percentile of each dimension; the gripper, the last, keeps its own values."""
    mask = np.ones(labels.shape[1], dtype=np.bool_)
    mask[-1] = False
    return ActionStatistics(
        q01=np.quantile(labels, 0.01, axis=0),
        q99=np.quantile(labels, 0.99, axis=0),
        mask=mask,
        mean=labels.mean(axis=0),
        std=labels.std(axis=0),
        minimum=labels.min(axis=0),
        maximum=labels.max(axis=0),
        num_transitions=len(labels),
        num_trajectories=num_episodes,
    )


def _samples(
    episodes: Sequence[LabelledEpisode],
    instructions: Sequence[str],
    config: OpenVLAConfig,
    statistics: ActionStatistics,
) -> PolicySamples:
    codec = ActionCodec(config.vocabulary)
    parts = [
        PolicySamples(
            frames=np.stack(episode.frames),
            labels=codec.encode(episode.labels, statistics),
            positions=episode.positions,
            weights=np.array([weight(str(one)) for one in episode.phases], np.float32),
            prompt=np.full(len(episode.labels), instructions.index(episode.instruction)),
        )
        for episode in episodes
    ]
    return PolicySamples.join(parts)
