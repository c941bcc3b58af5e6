"""Opens and loads checkpoints of Qwen2.5-VL that answers with FAST codes: StarVLA's QwenFAST."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from deft_policies.base import Finding
from deft_policies.checkpoint.open import (
    CheckpointSource,
    check_memory,
    check_tensors,
    fill_network,
)
from deft_policies.decoding.captured import Layout, shapes_of
from deft_policies.errors import CheckpointError
from deft_policies.families.family import Family, choose_runner, fuse_kernels
from deft_policies.families.options import ModelOptions
from deft_policies.families.qwenfast.model import WIDEST, QwenFast, encode_prompt
from deft_policies.families.qwenfast.network import (
    QwenFastNetwork,
    check_head,
    find_places,
    read_config,
)
from deft_policies.families.qwenfast.policy_files import PolicyFiles
from deft_policies.families.qwenfast.run_folder import find_runs, read_run
from deft_policies.families.vla0.network import Vla0Config, new_name
from deft_policies.model.formats import Quantization
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.quantization import check_quantization
from deft_policies.model.tensor_names import TensorPlace

_USUAL_TOKENS = 20  # of an answer by transformers, where no file says
_INSTRUCTION = 96  # ids of an instruction that passes are captured for


class FastFamily(Family):
    """Chunks of actions, written as FAST codes by Qwen2.5-VL; says nothing of whose files."""

    config: Vla0Config
    writes_codes = True
    refuses = ("--prompt", "--pictures", "--image-chain", "--adapter")
    refusal = "the files of such a policy say all of this themselves; leave it out"

    def __init__(self, source: CheckpointSource | None, options: ModelOptions) -> None:
        """Raises `CheckpointError` for what is wrong, and for flags that say nothing to it."""
        super().__init__(source, options)
        if source is None:
            raise CheckpointError(
                f"--family {self.name} needs a checkpoint: random weights have no words"
            )
        if options.quantization not in (Quantization.NONE, Quantization.INT8):
            raise CheckpointError(
                f"--quantization {options.quantization.value}: {self.name} is served in int8 or "
                "unquantized; other formats were never compared"
            )
        self.files = files = self.read_files(source.directory)
        self._stored = {new_name(name): tensor for name, tensor in files.stored.items()}
        self.config = read_config(files.base, self._stored, files.statistics)
        shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        where = files.weight_files[0].parent
        check_tensors(where, shapes, find_places(self.config))
        last = max(*files.code_ids(), *files.stop_ids())
        if last >= self.config.llm.vocabulary:
            raise CheckpointError(
                f"{files.base}: the tokenizer has the id {last}, the weights have "
                f"{self.config.llm.vocabulary} words; they are of different models"
            )
        self.summary = (
            f"{self.name}: {files.num_steps} actions of {files.action_dim}, as FAST codes, from "
            f"{files.num_cameras} camera(s)"
        )

    @abstractmethod
    def read_files(self, folder: Path) -> PolicyFiles:
        """Read what the files say; raises `CheckpointError`."""

    @property
    def weight_folders(self) -> list[Path]:
        """The files alone: the folder may hold those of other steps, too."""
        return list(self.files.weight_files)

    @property
    def places(self) -> Sequence[TensorPlace]:
        """As they are kept: a head that is the table counts once."""
        with torch.device("meta"):
            network = QwenFastNetwork(self.config)
        parameters = network.named_parameters()
        return [TensorPlace(name, tuple(tensor.shape), name) for name, tensor in parameters]

    @property
    def reserve(self) -> Reserve:
        """What passes are captured for."""
        shortest = len(encode_prompt(self.files, ""))
        return Reserve(self.options.largest_batch, shortest, shortest + _INSTRUCTION)

    @property
    def longest_answer(self) -> int:
        """Tokens: one or two for a coefficient in any published tokenizer, and the end."""
        files, options = self.files, self.options
        usual = 2 * files.num_coefficients + 1
        if options.grammar == "on":  # it bounds answers itself
            return usual
        published = files.settings.max_new_tokens or _USUAL_TOKENS
        return options.max_tokens or max(usual, published)

    def planned_bytes(self, dtype: torch.dtype) -> Mapping[str, int]:
        """Of the decoder's passes; the tower's are small in comparison."""
        layout = Layout(self.reserve, WIDEST, self.longest_answer + 1)
        num_graphs = len(shapes_of(self.reserve, WIDEST, False))
        return layout.bytes_of(self.config.llm, dtype.itemsize, num_graphs)

    def findings(self) -> list[Finding]:
        """Traps that cost users their success without a word."""
        return self.files.findings()

    def load(
        self, device: torch.device, dtype: torch.dtype, runner: StepRunner | None = None
    ) -> QwenFast:
        """Read the weights."""
        options = self.options
        check_quantization(options.quantization, device, dtype)
        check_memory(self.places, device, dtype, options.quantization)
        check_head(self.config, self._stored)
        with torch.device("meta"):
            network = QwenFastNetwork(self.config).to(dtype)
        places = find_places(self.config)
        fill_network(network, places, self._stored, None, device, options.quantization)
        network.tie()
        fuse_kernels(network, options, device)
        runner = runner or choose_runner(options, device, self.reserve)
        return QwenFast(
            self.name, network, self.files, runner, self.longest_answer, options.grammar == "on"
        )


class QwenFastFamily(FastFamily):
    """Runs of StarVLA's QwenFAST."""

    name = "qwenfast"

    @staticmethod
    def matches(source: CheckpointSource | None, options: ModelOptions) -> bool:
        """By the configuration of its training."""
        return source is not None and bool(find_runs(source.directory))

    def read_files(self, folder: Path) -> PolicyFiles:
        """A run, and what it names."""
        files = read_run(folder)
        if self.options.num_steps not in (None, files.num_steps):
            raise CheckpointError(
                f"--chunk {self.options.num_steps}: the run's config.yaml says {files.num_steps}"
            )
        return files
