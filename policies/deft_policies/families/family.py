"""From a checkpoint's files and options to a model on its device.

A `Family` is recognised by a checkpoint's files. To open them finds all that is wrong before
weights are read; to load them gives a `Model`. Device, number format and network are chosen and
loaded the same way for all.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from deft_policies.base import Finding
from deft_policies.checkpoint.config import load_config
from deft_policies.checkpoint.open import Checkpoint, CheckpointSource, load_model
from deft_policies.errors import CheckpointError, DeviceError
from deft_policies.families.model import Encode, Model
from deft_policies.families.options import ModelOptions
from deft_policies.model.formats import Precision, Quantization
from deft_policies.model.graphs import Reserve, StepRunner, capture_on_cuda
from deft_policies.model.random_weights import NAMED_SIZES, build_random_model, word_ids
from deft_policies.model.sizes import OpenVLAConfig, VlaConfig
from deft_policies.model.tensor_names import TensorPlace
from deft_policies.model.vla import OpenVLAModel, VlaNetwork

_log = logging.getLogger(__name__)
LONGEST_INSTRUCTION = 128  # ids of a prompt that passes are captured for
DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}


class Family(ABC):
    """One kind of model. An instance is a checkpoint of it whose files were found in order.

    Without a `source`, weights are drawn.
    """

    name: str
    summary: str  # what it answers from what, for people
    config: VlaConfig
    refuses: tuple[str, ...] = ()  # flags, or kinds of them, that say nothing to it; and why
    refusal = ""
    writes_codes = False  # whether answers are FAST codes, which have a grammar
    pads_state = False  # whether its prompts can have a padded state

    def __init__(self, source: CheckpointSource | None, options: ModelOptions) -> None:
        """Check everything but the weights; raises `CheckpointError`."""
        if refused := options.set_flags(*self.refuses):
            raise CheckpointError(f"{', '.join(refused)}: {self.refusal}")
        if not self.writes_codes and options.set_flags("--grammar"):
            raise CheckpointError(f"--grammar: {self.name} writes no FAST codes; leave it out")
        if not self.pads_state and options.set_flags("--padded-state"):
            raise CheckpointError(f"--padded-state: {self.name} writes no state; leave it out")
        self.source, self.options = source, options

    @staticmethod
    @abstractmethod
    def matches(source: CheckpointSource | None, options: ModelOptions) -> bool:
        """Whether files, or options where no file tells, look like it."""

    @property
    @abstractmethod
    def places(self) -> Sequence[TensorPlace]:
        """The tensors of such a checkpoint, by which its memory is known."""

    def planned_bytes(self, dtype: torch.dtype) -> Mapping[str, int]:
        """Bytes that are allocated on a GPU besides the weights, by purpose; {} where unknown."""
        return {}

    def findings(self) -> Sequence[Finding]:
        """What `deft doctor` is to say of such a checkpoint besides."""
        return ()

    @property
    def weight_folders(self) -> list[Path]:
        """Where its weights are read from, folders or files; empty where they are drawn."""
        source = self.source
        if source is None:
            return []
        return [source.directory, source.tuned, *([source.overlay] if source.overlay else [])]

    @abstractmethod
    def load(
        self, device: torch.device, dtype: torch.dtype, runner: StepRunner | None = None
    ) -> Model:
        """Read the weights. `runner` is that of another model, if passes run on the same one."""


def choose_device(name: str | None) -> torch.device:
    """The device asked for, or a GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"unknown device {name!r}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"--device {name}: this torch ({torch.__version__}) sees no CUDA device")
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"--device {name}: only cpu and cuda are supported")
    return device


def choose_precision(options: ModelOptions, device: torch.device) -> tuple[Precision, str]:
    """The number format, and why: what is asked for, or else what follows from the machine.

    Nothing is timed, so every start of every replica on such a machine serves the same format.
    """
    if options.precision is not None:
        return options.precision, "as asked for"
    if options.usual_precision is not None:
        return options.usual_precision, "as the policy's files ask"
    if device.type == "cuda":
        return Precision.BFLOAT16, "the default on a GPU"
    if options.quantization is not Quantization.NONE:
        return Precision.FLOAT32, "the default of quantised weights on a CPU"
    if multiplies_tiles():
        return Precision.BFLOAT16, "the default on a CPU with AMX"
    return Precision.FLOAT32, "the default on a CPU without AMX"


def multiplies_tiles() -> bool:
    """Whether this processor multiplies bfloat16 in tiles (AMX)."""
    return torch.cpu._is_amx_tile_supported()


def choose_runner(options: ModelOptions, device: torch.device, reserve: Reserve) -> StepRunner:
    """Record passes where that helps, unless the options forbid it."""
    if device.type != "cuda":
        return StepRunner()
    pool = torch.cuda.graph_pool_handle() if options.has_graphs else None
    return StepRunner(partial(capture_on_cuda, pool) if options.has_graphs else None, reserve)


def load_network(
    checkpoint: Checkpoint | None,
    options: ModelOptions,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[OpenVLAModel, Encode]:
    """Read a checkpoint's weights and how it reads prompts, or draw random ones without one."""
    if checkpoint is None:
        config = named_sizes(options.random_weights)
        network = build_random_model(config, device, dtype, options.seed, options.quantization)
        encode: Encode = partial(word_ids, config.action_tokens.first)
    else:
        network = load_model(checkpoint, device, dtype, options.quantization)
        encode = checkpoint.encoder.encode
    fuse_kernels(network, options, device)
    return network, encode


def fuse_kernels(
    network: VlaNetwork, options: ModelOptions, device: torch.device, by_default: bool = True
) -> None:
    """Have a GPU run fused kernels; they need Triton, which PyTorch for CUDA brings along."""
    is_wanted = by_default if options.fuses_kernels is None else options.fuses_kernels
    if device.type != "cuda" or not is_wanted:
        return
    try:
        # Imported here: only GPUs need it, and it takes seconds.
        from deft_policies.model.kernels.launch import add_whole_sums, kernels_for
    except ImportError:
        _log.warning("no Triton here: passes take three times as many kernels; pip install triton")
    else:
        add_whole_sums()
        network.fuse(kernels_for(device))


def named_sizes(name: str | None) -> OpenVLAConfig:
    """The sizes that `--random-weights` names."""
    assert name is not None
    if name in NAMED_SIZES:
        return NAMED_SIZES[name]()
    path = Path(name)
    if path.exists():
        return load_config(path if path.is_dir() else path.parent)
    names = ", ".join(NAMED_SIZES)
    raise CheckpointError(
        f"--random-weights {name}: expected one of {names}, or a directory with a config.json"
    )
