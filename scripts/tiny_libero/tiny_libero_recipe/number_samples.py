"""From demonstrations to a policy that writes numbers: statistics, tokenizer, numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deft_core.datasets.demonstrations import Demonstration
from deft_core.peers.conventions import to_robosuite
from deft_draft_training.errors import DataError
from deft_policies.checkpoint.config import load_tokenizer
from deft_policies.families.vla0.run_folder import RunFolder, read_run
from deft_policies.model.sizes import TrainingNotes
from tiny_libero_recipe.data import PolicySamples
from tiny_libero_recipe.episodes import (
    auxiliary_positions,
    request_of,
    step_weights,
    training_notes,
)
from tiny_libero_recipe.language import PATTERNS, PLACES, THINGS
from tiny_libero_recipe.number_checkpoint import write_number_checkpoint
from tiny_libero_recipe.number_fit import run_of
from tiny_libero_recipe.number_model import NumberNet
from tiny_libero_recipe.number_tokenizer import build_number_tokenizer
from tiny_libero_recipe.numbers import chunks, repeated_share, to_numbers


@dataclass(frozen=True, eq=False)
class PreparedNumbers:
    """Everything a training run starts from."""

    run: RunFolder
    tokenizer: Tokenizer
    samples: PolicySamples
    repeated: NDArray[np.float64]  # share of numbers that the next frame has again, by dimension
    training: TrainingNotes


def prepare_numbers(episodes: Sequence[Demonstration], kept: Path | None = None) -> PreparedNumbers:
    """Build samples. The range and the tokenizer are those of a checkpoint if one is kept."""
    if not episodes:
        raise DataError("none of the demonstrations succeeded; nothing to train on")
    actions = [np.stack([to_robosuite(row) for row in one.labels]) for one in episodes]
    if kept is not None:
        run = read_run(kept)
        tokenizer = load_tokenizer(run.model)
    else:
        every = np.concatenate(actions)
        run = run_of(every.min(axis=0), every.max(axis=0), Path("the tokenizer"))
        instructions = {request_of(one).instruction for one in episodes}
        sentences = {
            pattern.format(thing=thing, place=place)
            for pattern, thing, place in product(PATTERNS, THINGS, PLACES)
        }
        tokenizer = build_number_tokenizer(instructions | sentences, run)
    numbers = [to_numbers(chunks(one), run.lowest, run.highest) for one in actions]
    samples = PolicySamples.join(
        _samples(one, numbers_of) for one, numbers_of in zip(episodes, numbers, strict=True)
    )
    repeated = repeated_share([one[:, 0] for one in numbers])
    return PreparedNumbers(run, tokenizer, samples, repeated, training_notes(episodes))


def _samples(episode: Demonstration, numbers: NDArray[np.int64]) -> PolicySamples:
    return PolicySamples(
        encoded=episode.encoded,
        labels=numbers.reshape(len(numbers), -1),
        positions=auxiliary_positions(episode),
        weights=step_weights(episode),
        requests=[request_of(episode)] * len(episode),
        thoughts=[""] * len(episode),
    )


def write_numbers(
    net: NumberNet, prepared: PreparedNumbers, directory: Path, dtype: torch.dtype
) -> None:
    """Write what inference uses; the auxiliary head stays behind."""
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in net.named_tensors().items()
    }
    config = replace(net.config, training=prepared.training)
    write_number_checkpoint(directory, prepared.run, config, tensors, prepared.tokenizer)
