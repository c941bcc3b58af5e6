"""From a checkpoint's files and options to a model on its device.

A `Family` is recognised by a checkpoint's files. To open them finds all that is wrong before
weights are read; to load them gives a `Model`. Device, number format and network are chosen and
loaded the same way for all.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import torch

from deft_policies.checkpoint.config import load_config
from deft_policies.checkpoint.open import Checkpoint, CheckpointSource, load_model
from deft_policies.decoding.methods import AUTOREGRESSIVE
from deft_policies.decoding.target import Prompts, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.errors import CheckpointError, DeviceError
from deft_policies.families.model import Encode, Model
from deft_policies.families.options import ModelOptions
from deft_policies.model.formats import Precision, Quantization
from deft_policies.model.graphs import Reserve, StepRunner, capture_on_cuda
from deft_policies.model.kv_cache import STRIP
from deft_policies.model.llama import LlamaDecoder
from deft_policies.model.random_weights import NAMED_SIZES, build_random_model, word_ids
from deft_policies.model.sizes import LlamaSizes, OpenVLAConfig, TokenRange, VlaConfig
from deft_policies.model.tensor_names import TensorPlace
from deft_policies.model.vla import OpenVLAModel, allocate

_log = logging.getLogger(__name__)
# To find the faster format on a CPU.
_TIMED_RUNS = 6
_PROMPT = 96  # positions, patches among them
_FEW_TOKENS = 256  # of a vocabulary: the head is left out
_BEYOND_CACHES = 2**24  # numbers of layers that no processor's caches hold
_CLEARLY_FASTER = 0.9  # so that the same machine chooses the same format next time
LONGEST_INSTRUCTION = 64  # ids of a prompt that passes are captured for
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

    def __init__(self, source: CheckpointSource | None, options: ModelOptions) -> None:
        """Check everything but the weights; raises `CheckpointError`."""
        if given := options.given(*self.refuses):
            raise CheckpointError(f"{', '.join(given)}: {self.refusal}")
        self.source, self.options = source, options

    @staticmethod
    @abstractmethod
    def matches(source: CheckpointSource | None, options: ModelOptions) -> bool:
        """Whether files, or options where no file tells, look like it."""

    @property
    @abstractmethod
    def places(self) -> Sequence[TensorPlace]:
        """The tensors of such a checkpoint, by which its memory is known."""

    @property
    def weight_folders(self) -> list[Path]:
        """Where the files lie that its weights are read from; empty where they are drawn."""
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


def choose_precision(
    options: ModelOptions, device: torch.device, config: VlaConfig | None = None
) -> tuple[Precision, str]:
    """The number format, and why. Without a `config` no format is timed."""
    if options.precision is not None:
        return options.precision, "as asked for"
    if options.usual_precision is not None:
        return options.usual_precision, "as the policy's files ask"
    if device.type == "cuda":
        return Precision.BFLOAT16, "the default on a GPU"
    usual, reason = Precision.FLOAT32, "the default on a CPU"
    if options.quantization is not Quantization.NONE or not multiplies_bfloat16():
        return usual, reason
    if config is None:
        return usual, f"{reason}, unless bfloat16 is found faster at the start"
    return find_faster(config.llm, options.decoding == AUTOREGRESSIVE)


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 natively."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@lru_cache(maxsize=8)
def find_faster(sizes: LlamaSizes, is_plain: bool) -> tuple[Precision, str]:
    """Time some of a decoder's layers in both formats: bfloat16 where it is clearly faster."""
    layer_numbers = sizes.width * (4 * sizes.width + 3 * sizes.mlp_width)
    num_layers = min(sizes.num_layers, 1 + _BEYOND_CACHES // layer_numbers)
    some = replace(sizes, num_layers=num_layers, vocabulary=_FEW_TOKENS)
    took = {one: _answer_ms(some, DTYPES[one], is_plain) for one in Precision}
    ratio = took[Precision.BFLOAT16] / took[Precision.FLOAT32]
    faster = Precision.BFLOAT16 if ratio < _CLEARLY_FASTER else Precision.FLOAT32
    spent = ", ".join(f"{one.value} {ms:.1f} ms" for one, ms in took.items())
    layers = f"{num_layers} of {sizes.num_layers} layers"
    return faster, f"{layers} took {spent} of an answer; bfloat16 must be 10% faster"


@torch.inference_mode()
def _answer_ms(sizes: LlamaSizes, dtype: torch.dtype, is_plain: bool) -> float:
    """What layers take of an action: the prefill, then plain passes or half as many with drafts."""
    with torch.device("meta"):
        decoder = LlamaDecoder(sizes).to(dtype)
    allocate(decoder, torch.device("cpu"))
    for parameter in decoder.parameters():
        parameter.fill_(2.0**-8)
    target = Target(decoder, TokenRange(0, _FEW_TOKENS - 1))
    root = torch.zeros(1, 1, dtype=torch.int64)
    embeds = decoder.embedding(root.expand(1, _PROMPT))
    prompts = Prompts(embeds, torch.tensor([_PROMPT]), root[:, 0], slice(0))
    cache, pass_tree = target.new_cache(), DraftTree.chain(root.expand(1, 1 if is_plain else 8))
    cache.reserve(1, _PROMPT + STRIP)
    prefill_s, pass_s = [], []
    for _ in range(_TIMED_RUNS):
        started = time.perf_counter()
        target.prefill(cache, 0, prompts, DraftTree.root_only(root[:, 0]))
        between = time.perf_counter()
        target.score(cache, pass_tree)
        prefill_s.append(between - started)
        pass_s.append(time.perf_counter() - between)
    return 1e3 * (min(prefill_s) + (6 if is_plain else 3) * min(pass_s))


def choose_runner(options: ModelOptions, device: torch.device, reserve: Reserve) -> StepRunner:
    """Record passes where that helps, unless the options forbid it."""
    if device.type == "cuda" and options.has_graphs:
        return StepRunner(partial(capture_on_cuda, torch.cuda.graph_pool_handle()), reserve)
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
        encode: Encode = partial(word_ids, config.action_tokens.first)
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
