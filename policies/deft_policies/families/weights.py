"""From options to a network on its device, the same for all families."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deft_policies.checkpoint.config import load_config
from deft_policies.checkpoint.open import Checkpoint, load_model
from deft_policies.errors import CheckpointError, DeviceError
from deft_policies.families.options import ModelOptions
from deft_policies.model.formats import Precision
from deft_policies.model.graphs import CapturedRunner, CudaCapturer
from deft_policies.model.layout import EagerRunner, Reserve, StepRunner
from deft_policies.model.random_weights import NAMED_SIZES, build_random_model, word_ids
from deft_policies.model.sizes import OpenVLAConfig
from deft_policies.model.vla import OpenVLAModel

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels

_log = logging.getLogger(__name__)
Encode = Callable[[str], Sequence[int]]  # an instruction to the ids of the whole prompt
LONGEST_INSTRUCTION = 64  # ids of a prompt that passes are captured for
_DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}


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


def choose_dtype(precision: Precision | None, device: torch.device) -> torch.dtype:
    """The number format asked for: by default bfloat16 on a GPU, float32 on a CPU."""
    if precision is None:
        precision = Precision.BFLOAT16 if device.type == "cuda" else Precision.FLOAT32
    return _DTYPES[precision]


def choose_runner(options: ModelOptions, device: torch.device, reserve: Reserve) -> StepRunner:
    """Record passes where that helps, unless the options forbid it."""
    if device.type == "cuda" and options.has_graphs:
        return CapturedRunner(CudaCapturer(), reserve)
    return EagerRunner()


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
        encode: Encode = partial(word_ids, config.vocabulary.tokens.first)
    else:
        network = load_model(checkpoint, device, dtype, options.quantization)
        encode = checkpoint.encoder.encode
    kernels = _find_kernels(device) if options.fuses_kernels else None
    if kernels is not None:
        network.fuse(kernels)
    return network, encode


def named_sizes(name: str | None) -> OpenVLAConfig:
    """The sizes that `--random-weights` names."""
    assert name is not None
    if name in NAMED_SIZES:
        return NAMED_SIZES[name]()
    path = Path(name)
    if path.exists():
        return load_config(path if path.is_dir() else path.parent)
    known = ", ".join(NAMED_SIZES)
    raise CheckpointError(
        f"--random-weights {name}: expected one of {known}, or a directory with a config.json"
    )


def _find_kernels(device: torch.device) -> "FusedKernels | None":
    """Fused kernels where they run: on CUDA, with Triton, which PyTorch for CUDA brings along."""
    if device.type != "cuda":
        return None
    try:
        # Imported here: only GPUs need it, and it takes seconds.
        from deft_policies.model.kernels.launch import FusedKernels
    except ImportError:
        _log.warning("no Triton here: passes take three times as many kernels; pip install triton")
        return None
    return FusedKernels()
