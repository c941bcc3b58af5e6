"""From options to a policy: weights on their device, tokenizer, statistics, draft head."""

import logging
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deft_policies.checkpoint.config import load_config
from deft_policies.checkpoint.open import load_model, open_checkpoint
from deft_policies.decoding.decoder import DraftModels
from deft_policies.decoding.drafts.eagle import load_head
from deft_policies.decoding.drafts.guessers import load_index
from deft_policies.decoding.drafts.medusa import is_medusa, load_medusa
from deft_policies.decoding.drafts.small_model import self_draft_target
from deft_policies.decoding.knobs import find_method
from deft_policies.decoding.methods import Method
from deft_policies.decoding.sampling import Sampling
from deft_policies.errors import CheckpointError, DeviceError
from deft_policies.model.graphs import CapturedRunner, CudaCapturer
from deft_policies.model.image import ImageProcessor
from deft_policies.model.layout import EagerRunner, Reserve, StepRunner
from deft_policies.model.quantization import check_quantization, quantize_linears
from deft_policies.model.random_weights import NAMED_SIZES, WordIds, build_random_model
from deft_policies.model.statistics import find_statistics_key
from deft_policies.model.vla import OpenVLAModel
from deft_policies.oft.recognition import check_is_openvla
from deft_policies.openvla.options import OpenVLAOptions, Precision, Quantization, WeightOptions
from deft_policies.openvla.policy import OpenVLAPolicy, PolicyParts, PolicySettings, PromptSource
from deft_policies.openvla.target import OpenVLATarget

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels

_log = logging.getLogger(__name__)
LONGEST_INSTRUCTION = 64  # ids of a prompt that passes are captured for
_DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}


def load_policy(options: OpenVLAOptions) -> OpenVLAPolicy:
    """Load what the options name; what needs no weights to be checked is checked before them."""
    method = _choose_method(options)
    _check_files(options)
    device = choose_device(options.device)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    dtype = choose_dtype(options.precision, device)
    check_quantization(options.quantization, device, dtype)
    parts = _load_parts(options, device, dtype)
    draft = None
    if options.draft_model is not None:
        theirs = replace(options, checkpoint=options.draft_model, adapter=None, random_weights=None)
        draft = _load_parts(replace(theirs, statistics_key=None), device, dtype, parts.target)
        check_fits(draft, parts)
    parts = replace(parts, drafts=_load_drafts(options, parts.target, draft), draft=draft)
    return OpenVLAPolicy(parts, _settings(options, method, device, dtype))


def _load_parts(
    options: OpenVLAOptions,
    device: torch.device,
    dtype: torch.dtype,
    beside: OpenVLATarget | None = None,
) -> PolicyParts:
    """Everything but what drafts; what runs passes is shared with the target it stands beside."""
    model, encoder = _load_model(options, device, dtype)
    if device.type == "cpu" and options.quantization is Quantization.NONE:
        model.decoder.prefer_columns()
    fuse_kernels(model, options, device)
    first, last = model.config.num_patches + 1, model.config.num_patches + LONGEST_INSTRUCTION
    reserve = Reserve(options.largest_batch, first, last)
    runner = beside.runner if beside is not None else choose_runner(options, device, reserve)
    return PolicyParts(
        target=OpenVLATarget(model, action_rows_only=options.action_rows_only, runner=runner),
        encoder=encoder,
        images=ImageProcessor(model.config.image, options.image_chain),
        statistics=model.config.statistics,
    )


def check_fits(draft: PolicyParts, target: PolicyParts) -> None:
    """Raise `CheckpointError` unless an action means the same to a draft model and its target."""
    theirs, ours = (one.target.model.config.vocabulary.num_bins for one in (draft, target))
    if theirs != ours:
        raise CheckpointError(
            f"--draft-model: its actions have {theirs} bins, the target's {ours}; a draft model "
            "needs the same bins"
        )
    shared = draft.statistics.keys() & target.statistics.keys()
    if not shared:
        raise CheckpointError(
            f"--draft-model: it knows actions of {', '.join(draft.statistics)}, the target of "
            f"{', '.join(target.statistics)}; a draft model needs statistics under the same key"
        )
    for key in sorted(shared):
        if not draft.statistics[key].means_the_same(target.statistics[key]):
            raise CheckpointError(
                f"--draft-model: its statistics of {key!r} are others than the target's, so that "
                "its bins are other actions; use a checkpoint that was trained on the same data"
            )


def load_float32_twin(options: OpenVLAOptions) -> OpenVLAPolicy:
    """The same weights in float32 and not quantised: what other formats are audited against."""
    plain = replace(
        options,
        quantization=Quantization.NONE,
        draft_heads=(),
        retrieval_index=None,
        draft_model=None,
        self_draft_layers=None,
        drafts=None,
    )
    if options.random_weights is None:
        return load_policy(replace(plain, precision=Precision.FLOAT32))
    # Random numbers depend on the format they are drawn in, so these are drawn in the other one.
    drawn = load_policy(replace(plain, precision=Precision.BFLOAT16))
    target = OpenVLATarget(drawn.parts.target.model.float())
    device = target.device
    return OpenVLAPolicy(
        replace(drawn.parts, target=target),
        _settings(plain, _choose_method(plain), device, torch.float32),
    )


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


def _load_model(
    options: OpenVLAOptions, device: torch.device, dtype: torch.dtype
) -> tuple[OpenVLAModel, PromptSource]:
    if (options.checkpoint is None) == (options.random_weights is None):
        raise CheckpointError(
            "give one of --checkpoint (a directory or hub id) and --random-weights (sizes)"
        )
    if options.random_weights is not None:
        return build_random(options.random_weights, options, device, dtype)
    assert options.checkpoint is not None
    checkpoint = open_checkpoint(options.checkpoint, options.adapter)
    source = checkpoint.source
    check_is_openvla(source.tuned, source.read_statistics(), options.num_steps)
    if options.statistics_key is not None:
        find_statistics_key(tuple(checkpoint.config.statistics), options.statistics_key)
    model = load_model(checkpoint, device, dtype, options.quantization)
    return model, checkpoint.encoder


def build_random(
    name: str, options: WeightOptions, device: torch.device, dtype: torch.dtype
) -> tuple[OpenVLAModel, PromptSource]:
    """A model of these sizes whose answers are noise, for measuring."""
    if name in NAMED_SIZES:
        config = NAMED_SIZES[name]()
    elif Path(name).exists():
        path = Path(name)
        config = load_config(path if path.is_dir() else path.parent)
    else:
        known = ", ".join(NAMED_SIZES)
        raise CheckpointError(
            f"--random-weights {name}: expected one of {known}, or a directory with a config.json"
        )
    model = build_random_model(config, device, dtype, options.seed)
    for layer in model.decoder.layers:
        quantize_linears(layer, options.quantization, device)
    return model, WordIds(config.vocabulary.tokens.first)


def _load_drafts(
    options: OpenVLAOptions, target: OpenVLATarget, draft: PolicyParts | None
) -> DraftModels:
    model = target.model
    like, width = model.decoder.embedding.weight, model.config.llm.width
    drafts = DraftModels(
        rope_offset=options.rope_offset,
        key_mask=options.key_mask,
        runner=target.runner,
        small_model=None if draft is None else draft.target,
    )
    for directory in options.draft_heads:
        if is_medusa(directory):
            drafts = replace(drafts, medusa=load_medusa(directory, width, like))
        else:
            drafts = replace(drafts, head=load_head(directory, width, like))
    if options.retrieval_index is not None:
        index = load_index(options.retrieval_index, model.fingerprint(), like.device)
        drafts = replace(drafts, index=index)
    if options.self_draft_layers is not None:
        shallow = self_draft_target(target, options.self_draft_layers, target.runner)
        drafts = replace(drafts, small_model=shallow)
    return drafts


def choose_runner(
    options: WeightOptions, device: torch.device, reserve: Reserve | None = None
) -> StepRunner:
    """Record passes where that helps, unless the options forbid it."""
    if device.type == "cuda" and options.has_graphs:
        return CapturedRunner(CudaCapturer(), reserve)
    return EagerRunner()


def fuse_kernels(model: OpenVLAModel, options: WeightOptions, device: torch.device) -> None:
    """Let passes run with fused kernels where there are some, unless the options forbid it."""
    kernels = find_kernels(device) if options.fuses_kernels else None
    if kernels is not None:
        model.fuse(kernels)


def find_kernels(device: torch.device) -> "FusedKernels | None":
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


def _settings(
    options: OpenVLAOptions, method: Method, device: torch.device, dtype: torch.dtype
) -> PolicySettings:
    return PolicySettings(
        name=options.name,
        statistics_key=options.statistics_key,
        method=method,
        sampling=Sampling(options.temperature, options.seed),
        is_guarded=options.is_guarded,
        versions=(("deft", version_of("deft-vla")), ("torch", torch.__version__)),
        details=(
            ("weights", options.checkpoint or f"random:{options.random_weights}"),
            ("device", describe_device(device)),
            ("dtype", str(dtype).removeprefix("torch.")),
            ("quantization", options.quantization.value),
            *([("draft model", options.draft_model)] if options.draft_model else []),
            ("head", "action rows only" if options.action_rows_only else "whole vocabulary"),
            ("cameras", "image alone; further cameras are ignored"),
        ),
    )


def _check_files(options: OpenVLAOptions) -> None:
    """Raise `CheckpointError` for a head or an index that is not there, and two small models."""
    if options.draft_model is not None and options.self_draft_layers is not None:
        raise CheckpointError("give --draft-model or --self-draft-layers: there is one small model")
    for head in options.draft_heads:
        if not head.is_dir():
            raise CheckpointError(
                f"--draft-head {head}: no such directory; `deft train export` writes one"
            )
    index = options.retrieval_index
    if index is not None and not index.is_file():
        raise CheckpointError(
            f"--retrieval-index {index}: no such file; `deft index DATA --out {index}` writes one"
        )


def _choose_method(options: OpenVLAOptions) -> Method:
    method = find_method(options.decoding)
    if options.radius is not None:
        method = method.with_radius(options.radius)
    if options.drafts is not None:
        method = method.with_drafts(options.drafts)
    if options.draft_tree is not None:
        method = method.with_shape(options.draft_tree)
    return method


def describe_device(device: torch.device) -> str:
    """The device as people know it."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"


def version_of(distribution: str) -> str:
    """The installed version of a distribution."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
