"""Opens VLA-0's runs: everything that files say, before weights are read."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from deft_policies.checkpoint.open import CheckpointSource, check_memory
from deft_policies.errors import CheckpointError
from deft_policies.families.family import Family, choose_runner
from deft_policies.families.options import ModelOptions
from deft_policies.families.vla0.model import Vla0
from deft_policies.families.vla0.network import (
    HEAD,
    Vla0Weights,
    find_ids,
    load_tokenizer,
    read_config,
)
from deft_policies.families.vla0.run_folder import is_run_folder, read_run
from deft_policies.model.formats import Quantization
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.quantization import check_quantization
from deft_policies.model.statistics import ActionStatistics
from deft_policies.model.tensor_names import TensorPlace

KEY = "default"  # a run has statistics of one data set
MAX_TOKENS = 1024  # of an answer, as published
_PROMPT = range(208, 272)  # ids of usual prompts


class Vla0Family(Family):
    """Chunks of actions, written as numbers."""

    name = Vla0.family

    def __init__(self, source: CheckpointSource | None, options: ModelOptions) -> None:
        """Raises `CheckpointError` for what is wrong, and for flags that say nothing to it."""
        super().__init__(source, options)
        source = _check(source, options)
        base = None if source.overlay is None else source.directory
        self._run = run = read_run(source.tuned, base)
        self._tokenizer = load_tokenizer(run.model)
        low, high = (one.astype(np.float64) for one in (run.lowest, run.highest))
        statistics = ActionStatistics(low, high, np.ones(run.action_dim, bool))
        ids = find_ids(self._tokenizer, run.model)
        self.config = read_config(run.base, ids, {KEY: statistics})
        adapter = None if run.base == run.model else run.model
        self._weights = Vla0Weights.find(run.base, self.config, adapter)
        self.summary = (
            f"vla0: {run.num_steps} actions of {run.action_dim}, written as numbers, from "
            f"{run.num_cameras} camera(s)"
        )

    @staticmethod
    def matches(source: CheckpointSource | None, options: ModelOptions) -> bool:
        """By the configuration of its training."""
        return source is not None and is_run_folder(source.tuned)

    @property
    def weight_folders(self) -> list[Path]:
        """The model's, and where an adapter changes another model, that one's, too."""
        return [self._run.model, self._run.base]

    @property
    def places(self) -> Sequence[TensorPlace]:
        """As they are kept: twelve rows of the head, and for prompts the whole table of words."""
        config = self._weights.config
        return [
            replace(one, shape=(len(config.ids), config.llm.width))
            if one.parameter == HEAD
            else one
            for one in self._weights.places
        ]

    def load(
        self, device: torch.device, dtype: torch.dtype, runner: StepRunner | None = None
    ) -> Vla0:
        """Read the weights."""
        options = self.options
        check_quantization(options.quantization, device, dtype)
        check_memory(self.places, device, dtype, options.quantization)
        network = self._weights.load(device, dtype, options.quantization)
        reserve = Reserve(options.largest_batch, _PROMPT.start, _PROMPT.stop)
        runner = runner or choose_runner(options, device, reserve)
        max_tokens = options.max_tokens or MAX_TOKENS
        return Vla0(network, self._run, self._tokenizer, runner, max_tokens)


def _check(source: CheckpointSource | None, options: ModelOptions) -> CheckpointSource:
    """The source, where it is a run and nothing is asked that a run says itself."""
    if source is None:
        raise CheckpointError("--family vla0 needs a checkpoint: random weights have no words")
    said = {
        "--prompt": options.prompt,
        "--chunk": options.num_steps,
        "--pictures": options.num_pictures,
        "--image-chain": options.image_chain,
        "--action-rows-only": options.action_rows_only or None,
    }
    if options.quantization not in (Quantization.NONE, Quantization.INT8):
        raise CheckpointError(
            f"--quantization {options.quantization.value}: vla0 is served in int8 or unquantized; "
            "nobody has compared its numbers in another format"
        )
    given = [name for name, value in said.items() if value is not None]
    if given:
        raise CheckpointError(
            f"{', '.join(given)}: a run of vla0 says all of this itself; leave it out"
        )
    if not is_run_folder(source.tuned):
        raise CheckpointError(
            f"neither {source.tuned} nor the folder above it has config.yaml and "
            "dataset_stats; give a run's folder, or the model in it"
        )
    return source
