"""Opens and loads VLA-0's runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deft_policies.checkpoint.config import load_tokenizer
from deft_policies.checkpoint.lora import LoraAdapter
from deft_policies.checkpoint.open import (
    CheckpointSource,
    check_memory,
    check_tensors,
    fill_network,
)
from deft_policies.checkpoint.tensor_file import find_tensors
from deft_policies.decoding.captured import Layout, shapes_of
from deft_policies.errors import CheckpointError
from deft_policies.families.family import Family, choose_runner, fuse_kernels
from deft_policies.families.options import ModelOptions
from deft_policies.families.vla0.model import WIDEST, Vla0
from deft_policies.families.vla0.network import (
    HEAD,
    Vla0Config,
    Vla0Network,
    find_ids,
    find_places,
    new_name,
    read_config,
)
from deft_policies.families.vla0.run_folder import find_run_folder, read_run
from deft_policies.model.formats import Quantization
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.quantization import check_quantization
from deft_policies.model.statistics import ActionStatistics
from deft_policies.model.tensor_names import TensorPlace

KEY = "default"  # a run has statistics of one data set
MAX_TOKENS = 1024  # of an answer, as published
_PROMPT = range(208, 272)  # ids of usual prompts
# Estimates of what the tower's captures take: kernels of a block, and bytes of each.
_NODES_OF_BLOCK, _BYTES_OF_NODE = 25, 10_000


class Vla0Family(Family):
    """Chunks of actions, written as numbers."""

    name = Vla0.family
    config: Vla0Config
    refuses = ("--prompt", "--chunk", "--pictures", "--image-chain")
    refusal = "a run of vla0 says all of this itself; leave it out"

    def __init__(self, source: CheckpointSource | None, options: ModelOptions) -> None:
        """Raises `CheckpointError` for what is wrong, and for flags that say nothing to it."""
        super().__init__(source, options)
        if source is None:
            raise CheckpointError("--family vla0 needs a checkpoint: random weights have no words")
        if options.quantization not in (Quantization.NONE, Quantization.INT8):
            raise CheckpointError(
                f"--quantization {options.quantization.value}: vla0 is served in int8 or "
                "unquantized; other formats were never compared"
            )
        base = None if source.overlay is None else source.directory
        self._run = run = read_run(source.tuned, base)
        self._tokenizer = load_tokenizer(run.model)
        low, high = (ends.astype(np.float64) for ends in (run.lowest, run.highest))
        statistics = ActionStatistics(low, high, np.ones(run.action_dim, bool))
        ids = find_ids(self._tokenizer, run.model)
        self.config = read_config(run.base, ids, {KEY: statistics})
        self._stored = {new_name(name): tensor for name, tensor in find_tensors(run.base).items()}
        shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        check_tensors(run.base, shapes, find_places(self.config))
        self._adapter = None if run.base == run.model else LoraAdapter(run.model)
        if self._adapter is not None:
            # Saved by another version than its base, perhaps.
            self._adapted = {new_name(name): name for name in self._adapter.targets}
            self._adapter.check({self._adapted.get(name, name): shapes[name] for name in shapes})
        self.summary = (
            f"vla0: {run.num_steps} actions of {run.action_dim}, written as numbers, from "
            f"{run.num_cameras} camera(s)"
        )

    @staticmethod
    def matches(source: CheckpointSource | None, options: ModelOptions) -> bool:
        """By the configuration of its training."""
        return source is not None and find_run_folder(source.tuned) is not None

    @property
    def weight_folders(self) -> list[Path]:
        """The model's, and where an adapter changes another model, that one's, too."""
        return [self._run.model, self._run.base]

    @property
    def places(self) -> Sequence[TensorPlace]:
        """As they are kept: twelve rows of the head, and for prompts the whole table of words."""
        with torch.device("meta"):
            network = Vla0Network(self.config)
        parameters = network.named_parameters()
        return [TensorPlace(name, tuple(tensor.shape), name) for name, tensor in parameters]

    @property
    def longest_answer(self) -> int:
        """Tokens."""
        return self.options.max_tokens or MAX_TOKENS

    @property
    def reserve(self) -> Reserve:
        """What passes are captured for."""
        return Reserve(self.options.largest_batch, _PROMPT.start, _PROMPT.stop)

    def planned_bytes(self, dtype: torch.dtype) -> Mapping[str, int]:
        """Of the decoder's passes, and of the tower for as many frames as are seen at once."""
        layout, sizes = Layout(self.reserve, WIDEST, self.longest_answer + 1), self.config.vision
        num_graphs = len(shapes_of(self.reserve, WIDEST, keeps_hidden=False))
        planned = layout.bytes_of(self.config.llm, dtype.itemsize, num_graphs)
        rows, columns = self._run.grid
        patches = self.reserve.rows * self._run.num_pictures * rows * columns
        # Besides the residual stream queries, keys and values, some of it in float32, or the MLP's.
        of_patch = max(12 * sizes.width, 4 * sizes.width + 3 * sizes.mlp_width) * dtype.itemsize
        nodes = len(self.reserve.batches) * _NODES_OF_BLOCK * sizes.num_blocks
        return {**planned, "pictures": patches * of_patch + nodes * _BYTES_OF_NODE}

    def load(
        self, device: torch.device, dtype: torch.dtype, runner: StepRunner | None = None
    ) -> Vla0:
        """Read the weights."""
        options = self.options
        check_quantization(options.quantization, device, dtype)
        check_memory(self.places, device, dtype, options.quantization)
        with torch.device("meta"):
            network = Vla0Network(self.config).to(dtype)
        places, stored = find_places(self.config), self._stored
        fill_network(network, places, stored, self._merge, device, options.quantization)
        network.take_answer_rows()
        fuse_kernels(network, options, device)
        runner = runner or choose_runner(options, device, self.reserve)
        return Vla0(network, self._run, self._tokenizer, runner, self.longest_answer)

    def _merge(self, name: str, weight: Tensor) -> Tensor:
        """What is kept of a stored weight, with the adapter's change."""
        if self._adapter is not None:
            weight = self._adapter.merge(self._adapted.get(name, name), weight)
        return weight[list(self.config.answer_ids)] if name == HEAD else weight
