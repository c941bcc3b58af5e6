"""From options to an OFT policy. What no file says has to be said by flags."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from deft_policies.checkpoint.config import CONFIG_FILE
from deft_policies.checkpoint.fields import JsonFields
from deft_policies.checkpoint.open import Checkpoint, load_model, open_checkpoint
from deft_policies.errors import CheckpointError
from deft_policies.model.image import ImageProcessor
from deft_policies.model.sizes import OpenVLAConfig
from deft_policies.model.statistics import STATISTICS_FILE, find_statistics
from deft_policies.model.vla import OpenVLAModel
from deft_policies.oft.chunk_model import ChunkModel, ChunkParts, ChunkShape
from deft_policies.oft.files import OftFile, find_part, load_head, load_state_projector
from deft_policies.oft.film import FilmTowers
from deft_policies.oft.modules import RegressionHead, StateProjector
from deft_policies.oft.options import OftOptions
from deft_policies.oft.policy import OftParts, OftPolicy, OftSettings
from deft_policies.oft.ranges import Ranges, RangeScheme, RobotRanges, parse_ranges
from deft_policies.openvla.load import (
    build_random,
    choose_device,
    choose_dtype,
    choose_runner,
    describe_device,
    version_of,
)
from deft_policies.openvla.policy import PromptSource

_ALOHA_DIM = 14
_ALOHA_STEPS = 25
_LIBERO_STATE_DIM = 8
_NUM_HEAD_BLOCKS = 2


@dataclass(frozen=True, eq=False)
class _Loaded:
    """Weights and what belongs to them, before anything is said about pictures and steps."""

    model: OpenVLAModel
    parts: ChunkParts
    encoder: PromptSource
    ranges: Mapping[str, RobotRanges]
    source: str  # the file or folder that was looked at


def load_policy(options: OftOptions) -> OftPolicy:
    """Load what the options name."""
    device = choose_device(options.device)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    dtype = choose_dtype(options.precision, device)
    if options.random_weights is not None:
        loaded = _build_random(options, device, dtype)
    elif options.checkpoint is not None:
        checkpoint = open_checkpoint(options.checkpoint, options.adapter)
        loaded = _load(checkpoint, options, device, dtype)
    else:
        raise CheckpointError("give --checkpoint, the folder of an OFT fine-tune")
    shape = _choose_shape(options, loaded)
    parts = OftParts(
        model=ChunkModel(loaded.model, loaded.parts, shape, choose_runner(options, device)),
        encoder=loaded.encoder,
        images=ImageProcessor(loaded.model.config.image, options.image_chain),
        ranges=loaded.ranges,
        is_absolute=shape.action_dim == _ALOHA_DIM,
    )
    settings = OftSettings(
        statistics_key=options.statistics_key,
        versions=(("deft", version_of("deft-vla")), ("torch", torch.__version__)),
        details=(
            ("weights", options.checkpoint or f"random:{options.random_weights}"),
            ("device", describe_device(device)),
            ("dtype", str(dtype).removeprefix("torch.")),
            ("quantization", options.quantization.value),
            *_describe(shape, loaded.parts),
        ),
    )
    return OftPolicy(parts, settings)


def _load(
    checkpoint: Checkpoint, options: OftOptions, device: torch.device, dtype: torch.dtype
) -> _Loaded:
    directory, config = checkpoint.source.directory, checkpoint.config
    head = load_head(directory, config.llm.width)
    towers = FilmTowers.load(directory)
    if towers is not None:
        towers.check(config)
        checkpoint = replace(checkpoint, adapter=towers)
    if towers is not None and head is None:
        raise CheckpointError(
            f"{find_part(directory, OftFile.VISION)} is of a fine-tune with FiLM, which needs a "
            f"head, but {directory} has no *{OftFile.HEAD.value}*checkpoint*; copy it there"
        )
    parts = ChunkParts(
        head=head,
        # The original leaves the state out where the model answers with tokens.
        state=None if head is None else load_state_projector(directory, config.llm.width),
        film=None if towers is None else towers.build_film(config),
    )
    ranges = _load_ranges(checkpoint, parts)
    model = load_model(checkpoint, device, dtype, options.quantization)
    return _Loaded(model, parts, checkpoint.encoder, ranges, _say_source(checkpoint))


def _say_source(checkpoint: Checkpoint) -> str:
    directory = checkpoint.source.directory
    head = find_part(directory, OftFile.HEAD)
    return str(head or checkpoint.source.find(STATISTICS_FILE) / STATISTICS_FILE)


def _load_ranges(checkpoint: Checkpoint, parts: ChunkParts) -> Mapping[str, RobotRanges]:
    source = checkpoint.source
    path = source.find(STATISTICS_FILE) / STATISTICS_FILE
    remedy = "restore it"
    if path.exists():
        statistics = JsonFields.load(path, remedy)
    else:
        statistics = find_statistics(JsonFields.load(source.directory / CONFIG_FILE, remedy))
    dims = {one.action_dim for one in checkpoint.config.statistics.values()}
    if parts.head is not None:
        dims.add(parts.head.action_dim)
    if len(dims) > 1:
        raise CheckpointError(
            f"{statistics.path} and the head beside it disagree about the length of an action: "
            f"{sorted(dims)}; restore the files of one fine-tuning run"
        )
    is_aloha = dims == {_ALOHA_DIM}
    scheme = RangeScheme.EXTREMES if is_aloha else RangeScheme.QUANTILES
    ranges = parse_ranges(statistics, scheme)
    for key, one in ranges.items():
        if parts.state is None:
            continue
        found = 0 if one.state is None else len(one.state.low)
        wanted = parts.state.fc1.in_features
        if found != wanted:
            raise CheckpointError(
                f"{statistics.path}: {key}.proprio has {found} dimensions, "
                f"{find_part(source.directory, OftFile.STATE)} reads {wanted}; restore the files "
                "of one fine-tuning run"
            )
    return ranges


def _choose_shape(options: OftOptions, loaded: _Loaded) -> ChunkShape:
    action_dim = len(next(iter(loaded.ranges.values())).action.low)
    num_steps = _ALOHA_STEPS if action_dim == _ALOHA_DIM else None
    state = loaded.parts.state
    wanted = []
    if options.num_pictures is None:
        wanted.append(
            "--pictures N (1: the frame alone; 2: a wrist camera as well, as in LIBERO's published "
            "fine-tunes; 3: two of them, as in ALOHA's)"
        )
    if options.num_steps is None and num_steps is None:
        wanted.append("--chunk N (8 actions per answer in LIBERO's fine-tunes, 5 in Bridge's)")
    if wanted:
        raise CheckpointError(
            f"{loaded.source} tells that an action has {action_dim} numbers, but no file tells "
            f"the rest; say {' and '.join(wanted)}"
        )
    assert options.num_pictures is not None
    return ChunkShape(
        num_pictures=options.num_pictures,
        num_steps=options.num_steps or num_steps or 1,
        action_dim=action_dim,
        state_dim=None if state is None else state.fc1.in_features,
    )


def _describe(shape: ChunkShape, parts: ChunkParts) -> tuple[tuple[str, str], ...]:
    answers = "tokens" if parts.head is None else "an L1 head"
    wrists = shape.num_pictures - 1
    return (
        ("head", answers if parts.film is None else f"{answers}, FiLM in the towers"),
        ("cameras", f"image and {wrists} with 'wrist' in the name" if wrists else "image alone"),
        ("state", f"{shape.state_dim} numbers, raw" if shape.state_dim else "not looked at"),
    )


def _build_random(options: OftOptions, device: torch.device, dtype: torch.dtype) -> _Loaded:
    """A model with an L1 head that reads LIBERO's state, for measuring."""
    assert options.random_weights is not None
    model, encoder = build_random(options.random_weights, options, device, dtype)
    config = model.config
    width, action_dim = config.llm.width, next(iter(config.statistics.values())).action_dim
    torch.manual_seed(options.seed)
    with device:
        head = RegressionHead(width, action_dim, _NUM_HEAD_BLOCKS)
        state = StateProjector(_LIBERO_STATE_DIM, width)
    for part in (head, state):
        part.requires_grad_(False).eval()
    return _Loaded(
        model, ChunkParts(head, state), encoder, _unit_ranges(config), "--random-weights"
    )


def _unit_ranges(config: OpenVLAConfig) -> Mapping[str, RobotRanges]:
    ones = np.ones(_LIBERO_STATE_DIM)
    state = Ranges(-ones, ones, ones > 0)
    return {
        key: RobotRanges(Ranges(one.q01, one.q99, one.mask), state)
        for key, one in config.statistics.items()
    }
