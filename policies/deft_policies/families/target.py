"""From options to a network on its device, the same for all families, and a VLA as a target."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from deft_policies.checkpoint.config import load_config
from deft_policies.checkpoint.open import Checkpoint, load_model
from deft_policies.decoding.target import Prompts, Target
from deft_policies.errors import CheckpointError, DeviceError
from deft_policies.families.options import ModelOptions
from deft_policies.model.formats import Precision
from deft_policies.model.graphs import CapturedRunner, CudaCapturer
from deft_policies.model.layout import Reserve, StepRunner, Tensors, pad_batch
from deft_policies.model.random_weights import NAMED_SIZES, build_random_model, word_ids
from deft_policies.model.sizes import OpenVLAConfig
from deft_policies.model.staging import to_device
from deft_policies.model.vla import OpenVLAModel

_log = logging.getLogger(__name__)
Encode = Callable[[str], Sequence[int]]  # an instruction to the ids of the whole prompt
_BESIDE_PATCHES = 1  # patches come right after the first id
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


class VlaTarget(Target):
    """The decoder of an OpenVLA model, with the vision towers before it."""

    def __init__(
        self,
        model: OpenVLAModel,
        *,
        action_rows_only: bool = False,
        runner: StepRunner | None = None,
    ) -> None:
        super().__init__(
            model.decoder,
            model.config.vocabulary.tokens,
            action_rows_only=action_rows_only,
            runner=runner,
        )
        self.model = model
        if self.reads_lengths:
            model.pack_vision()

    @torch.no_grad()
    def read(self, pixels: Tensor, prompt_ids: Sequence[Sequence[int]]) -> Prompts:
        """Look at [row, channel, height, width] and lay the prompts around the patches.

        Shorter prompts are padded on the right with their last id, which nothing attends to.
        """
        longest = max(len(ids) for ids in prompt_ids)
        padded = [[*ids, *([ids[-1]] * (longest - len(ids)))] for ids in prompt_ids]
        ids = to_device(padded, self.device)
        texts = to_device([len(row) for row in prompt_ids], self.device)
        reserve = self.runner.reserve
        if reserve is not None and len(pixels) <= reserve.rows:
            pixels = pad_batch(pixels)
        patches, features = self.runner.run((self, "see", *pixels.shape), self._see_step, (pixels,))
        patches, features = patches[: len(ids)], features[: len(ids)]
        num_patches = patches.shape[1]
        return Prompts(
            embeds=self.model.compose(patches, ids),
            lengths=texts + num_patches,
            last_tokens=ids[:, -1],
            patches=slice(_BESIDE_PATCHES, _BESIDE_PATCHES + num_patches),
            features=features.clone(),  # a captured step overwrites its outputs next time
        )

    def _see_step(self, pixels: Tensor) -> Tensors:
        sight = self.model.see(pixels)
        return sight.patches, sight.features.mean(dim=1)
