"""From options to an OFT policy: weights on their device, and what the server says of them."""

from collections.abc import Sequence

import numpy as np
import torch

from deft_policies.base import Finding, Verdict
from deft_policies.checkpoint.open import load_model
from deft_policies.errors import PolicyError
from deft_policies.model.image import ImageProcessor
from deft_policies.model.quantization import check_quantization
from deft_policies.model.vla import OpenVLAModel
from deft_policies.oft.chunk_model import ChunkModel, ChunkParts, ChunkShape
from deft_policies.oft.fine_tune import choose_shape, is_absolute, open_fine_tune
from deft_policies.oft.modules import RegressionHead, StateProjector
from deft_policies.oft.options import OftOptions
from deft_policies.oft.policy import OftParts, OftPolicy, OftSettings
from deft_policies.oft.ranges import Ranges, RobotRanges
from deft_policies.openvla.examine import examine_weights, is_at_hand
from deft_policies.openvla.load import (
    LONGEST_INSTRUCTION,
    build_random,
    choose_device,
    choose_dtype,
    choose_runner,
    describe_device,
    fuse_kernels,
    version_of,
)

# What random weights imitate: LIBERO's published fine-tunes.
_NUM_HEAD_BLOCKS = 2
_STATE_DIM = 8


def load_policy(options: OftOptions) -> OftPolicy:
    """Load what the options name."""
    device = choose_device(options.device)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    dtype = choose_dtype(options.precision, device)
    check_quantization(options.quantization, device, dtype)
    if options.random_weights is not None:
        parts = _build_random(options, options.random_weights, device, dtype)
    else:
        parts = _load(options, device, dtype)
    shape, has_head = parts.model.shape, parts.model.parts.head is not None
    settings = OftSettings(
        statistics_key=options.statistics_key,
        versions=(("deft", version_of("deft-vla")), ("torch", torch.__version__)),
        details=(
            ("weights", options.checkpoint or f"random:{options.random_weights}"),
            ("device", describe_device(device)),
            ("dtype", str(dtype).removeprefix("torch.")),
            ("quantization", options.quantization.value),
            ("head", "L1 regression" if has_head else "tokens, whole vocabulary"),
            ("film", "no" if parts.model.parts.film is None else "yes"),
            ("cameras", f"image and {shape.num_pictures - 1} whose names contain 'wrist'"),
            ("state", "not looked at" if shape.state_dim is None else f"{shape.state_dim}, raw"),
        ),
    )
    return OftPolicy(parts, settings)


def examine(options: OftOptions) -> Sequence[Finding]:
    """Say whether `load_policy` could work; reads the fine-tune's own files, not the model's."""
    findings = examine_weights(options)
    if not is_at_hand(options, findings):
        return findings
    try:
        shape = open_fine_tune(options).shape
    except PolicyError as error:
        return [*findings, Finding("fine-tune", Verdict.BAD, str(error))]
    text = f"{shape.num_steps} actions of {shape.action_dim} from {shape.num_pictures} picture(s)"
    return [*findings, Finding("fine-tune", Verdict.GOOD, text)]


def _load(options: OftOptions, device: torch.device, dtype: torch.dtype) -> OftParts:
    tuned = open_fine_tune(options)
    model = load_model(tuned.checkpoint, device, dtype, options.quantization)
    return OftParts(
        model=_join(model, tuned.parts, tuned.shape, options, device),
        encoder=tuned.checkpoint.encoder,
        images=ImageProcessor(model.config.image, options.image_chain),
        ranges=tuned.ranges,
        is_absolute=is_absolute(tuned.shape),
    )


def _build_random(
    options: OftOptions, sizes: str, device: torch.device, dtype: torch.dtype
) -> OftParts:
    """A model with a head that reads a state, whose answers are noise."""
    model, encoder = build_random(sizes, options, device, dtype)
    width = model.config.llm.width
    (key, statistics), *_ = model.config.statistics.items()
    torch.manual_seed(options.seed)
    with device:
        head = RegressionHead(width, statistics.action_dim, _NUM_HEAD_BLOCKS)
        state = StateProjector(_STATE_DIM, width)
    own = ChunkParts(head.requires_grad_(False), state.requires_grad_(False))
    shape = choose_shape(options, statistics.action_dim, own, source=f"--random-weights {sizes}")
    ones = np.ones(_STATE_DIM)
    action = Ranges(statistics.q01, statistics.q99, statistics.mask)
    return OftParts(
        model=_join(model, own, shape, options, device),
        encoder=encoder,
        images=ImageProcessor(model.config.image, options.image_chain),
        ranges={key: RobotRanges(action, Ranges(-ones, ones, ones > 0))},
        is_absolute=False,
    )


def _join(
    model: OpenVLAModel,
    parts: ChunkParts,
    shape: ChunkShape,
    options: OftOptions,
    device: torch.device,
) -> ChunkModel:
    fuse_kernels(model, options, device)
    reserve = shape.reserve(model.config.num_patches, LONGEST_INSTRUCTION, options.largest_batch)
    return ChunkModel(model, parts, shape, choose_runner(options, device, reserve))
