"""From options to a network on its device, the same for all families."""

import logging
from functools import partial
from pathlib import Path

import torch

from deft_policies.checkpoint.config import load_config
from deft_policies.checkpoint.open import Checkpoint, load_model
from deft_policies.errors import CheckpointError, DeviceError
from deft_policies.families.options import ModelOptions
from deft_policies.families.target import Encode
from deft_policies.model.formats import CPU_CHOOSES_FORMAT, Precision
from deft_policies.model.graphs import CapturedRunner, CudaCapturer
from deft_policies.model.layout import Reserve, StepRunner
from deft_policies.model.random_weights import NAMED_SIZES, build_random_model, word_ids
from deft_policies.model.sizes import OpenVLAConfig
from deft_policies.model.vla import OpenVLAModel

_log = logging.getLogger(__name__)
LONGEST_INSTRUCTION = 64  # ids of a prompt that passes are captured for
DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}


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
    """The number format, and why: as asked for, else bfloat16 on a GPU and float32 on a CPU."""
    if options.precision is not None:
        return options.precision, "as asked for"
    if device.type == "cuda":
        return Precision.BFLOAT16, "the default on a GPU"
    if not may_choose(options, device):
        return Precision.FLOAT32, "the default on a CPU"
    return Precision.FLOAT32, "until the faster format is known"


def may_choose(options: ModelOptions, device: torch.device) -> bool:
    """Whether the faster of two formats is to be found out."""
    is_native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    is_open = options.precision is None and device.type == "cpu"
    return CPU_CHOOSES_FORMAT and is_open and is_native


def choose_runner(options: ModelOptions, device: torch.device, reserve: Reserve) -> StepRunner:
    """Record passes where that helps, unless the options forbid it."""
    if device.type == "cuda" and options.has_graphs:
        return CapturedRunner(CudaCapturer(), reserve)
    return StepRunner()


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
    if device.type == "cuda" and options.fuses_kernels:
        _fuse(network)
    return network, encode


def _fuse(network: OpenVLAModel) -> None:
    """Fused kernels need Triton, which PyTorch for CUDA brings along."""
    try:
        # Imported here: only GPUs need it, and it takes seconds.
        from deft_policies.model.kernels.launch import FusedKernels
    except ImportError:
        _log.warning("no Triton here: passes take three times as many kernels; pip install triton")
    else:
        network.fuse(FusedKernels())


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
