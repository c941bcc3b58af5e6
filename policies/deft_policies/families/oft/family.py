"""Opens OFT's fine-tunes: what files and flags say, before weights are read.

What no file of a fine-tune says has to be said by flags.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from deft_core.image_chain import ImageChain
from deft_policies.checkpoint.config import EXTREMES, QUANTILES, parse_statistics
from deft_policies.checkpoint.open import Checkpoint, CheckpointSource, open_source
from deft_policies.errors import CheckpointError
from deft_policies.families.family import (
    LONGEST_INSTRUCTION,
    Family,
    choose_runner,
    load_network,
    named_sizes,
)
from deft_policies.families.oft.files import (
    HEAD,
    STATE,
    VISION,
    FilmTowers,
    find_file,
    load_head,
    load_state_projector,
    read_part,
)
from deft_policies.families.oft.model import ChunkParts, Oft
from deft_policies.families.oft.modules import RegressionHead, StateProjector
from deft_policies.families.options import OF_DECODING, OF_REASONING, ModelOptions
from deft_policies.model.graphs import StepRunner
from deft_policies.model.image import ImageProcessor
from deft_policies.model.sizes import OpenVLAConfig
from deft_policies.model.statistics import ActionStatistics
from deft_policies.model.tensor_names import TensorPlace, tensor_places

# Two arms, commanded by poses of their joints. Everything else is one arm commanded by motions.
_ALOHA_DIM = 14
_ALOHA_STEPS = 25
# What random weights imitate: LIBERO's published fine-tunes.
_NUM_HEAD_BLOCKS = 2
_STATE_DIM = 8


# What states are normalised by is by key. Without a checkpoint weights are drawn.
Opened = tuple[OpenVLAConfig, ChunkParts, Mapping[str, ActionStatistics], Checkpoint | None]


class OftFamily(Family):
    """Chunks of actions in one pass, with OFT's head or as tokens."""

    name = Oft.family
    config: OpenVLAConfig

    refuses = (OF_DECODING, OF_REASONING)
    refusal = "an OFT model answers in one pass, nothing is drafted or written; leave it out"

    def __init__(self, source: CheckpointSource | None, options: ModelOptions) -> None:
        """Raises `CheckpointError` for what is wrong, and for what no file tells."""
        super().__init__(source, options)
        opened = _open_random(options) if source is None else _open_files(source, options)
        self.config, parts, self._states, self._checkpoint = opened
        self._parts = parts
        self.summary = (
            f"oft: {parts.num_steps} actions of {parts.action_dim} from {parts.num_pictures} "
            "picture(s)"
        )

    @staticmethod
    def matches(source: CheckpointSource | None, options: ModelOptions) -> bool:
        """By the head's file in the model's folder; a model that answers with tokens has none."""
        if options.num_pictures is not None or options.num_steps not in (None, 1):
            return True
        return source is not None and find_file(source.tuned, HEAD) is not None

    @property
    def places(self) -> Sequence[TensorPlace]:
        """Of the model; its parts are small."""
        return tensor_places(self.config)

    def load(
        self, device: torch.device, dtype: torch.dtype, runner: StepRunner | None = None
    ) -> Oft:
        """Read the weights, or draw them."""
        options, parts, config = self.options, self._parts, self.config
        network, encode = load_network(self._checkpoint, options, device, dtype)
        if self._checkpoint is None:
            parts = _drawn(parts, config.llm.width, options.seed, device)
        images = ImageProcessor(
            network.config.image,
            options.image_chain or ImageChain.OFT,
            resizes_on_device=device.type == "cuda",
        )
        model = Oft(network, parts, encode, images, config.statistics, self._states)
        reserve = model.reserve(LONGEST_INSTRUCTION, options.largest_batch)
        model.runner = runner or choose_runner(options, device, reserve)
        return model


def _open_files(source: CheckpointSource, options: ModelOptions) -> Opened:
    directory, film = source.tuned, find_file(source.tuned, VISION)
    if film is not None and source.overlay is not None:
        raise CheckpointError(
            f"{film} is of a fine-tune with FiLM, whose {source.overlay} cannot be merged here; "
            "merge it into its base with OFT's own script, and give the folder that this writes"
        )
    checkpoint = open_source(source)
    config = checkpoint.config
    head, towers = load_head(directory, config.llm.width), None
    if film is not None:
        if head is None:
            raise CheckpointError(
                f"{film} is of a fine-tune with FiLM, whose folder has a *{HEAD}*checkpoint*; "
                "restore that file"
            )
        towers = FilmTowers(film, read_part(film))
        towers.check(config)
        checkpoint = replace(checkpoint, merge=towers.merge)
    statistics = source.read_statistics()
    told_by = find_file(directory, HEAD) or statistics.path
    dims = {entry.action_dim for entry in config.statistics.values()}
    dims |= set() if head is None else {head.action_dim}
    if len(dims) > 1:
        raise CheckpointError(
            f"{statistics.path} and {told_by} disagree about the length of an action: "
            f"{sorted(dims)}; restore the files of one fine-tuning run"
        )
    parts = replace(
        _choose_parts(options, dims.pop(), told_by),
        head=head,
        # The original leaves the state out where the model answers with tokens.
        state=None if head is None else load_state_projector(directory, config.llm.width),
        film=None if towers is None else towers.build_film(config),
    )
    ends = EXTREMES if parts.action_dim == _ALOHA_DIM else QUANTILES
    actions = parse_statistics(statistics, "action", ends)
    states = parse_statistics(statistics, "proprio", ends)
    for key in actions:
        state_dim = states[key].action_dim if key in states else 0
        if parts.state_dim not in (None, state_dim):
            raise CheckpointError(
                f"{statistics.path}: {key}.proprio has {state_dim} dimensions, but "
                f"{find_file(directory, STATE)} reads {parts.state_dim}; restore the files "
                "of one fine-tuning run"
            )
    return replace(config, statistics=actions), parts, states, checkpoint


def _open_random(options: ModelOptions) -> Opened:
    """Sizes of a model with a head that reads a state, whose answers will be noise."""
    config = named_sizes(options.random_weights)
    (key, statistics), *_ = config.statistics.items()
    looked_at = f"--random-weights {options.random_weights}"
    parts = _choose_parts(options, statistics.action_dim, looked_at)
    ones = np.ones(_STATE_DIM)
    states = {key: ActionStatistics(-ones, ones, ones > 0)}
    return replace(config, statistics={key: statistics}), parts, states, None


def _drawn(parts: ChunkParts, width: int, seed: int, device: torch.device) -> ChunkParts:
    """With random weights: a head that reads a state."""
    torch.manual_seed(seed)
    with device:
        head = RegressionHead(width, parts.action_dim, _NUM_HEAD_BLOCKS)
        state = StateProjector(_STATE_DIM, width)
    return replace(parts, head=head.requires_grad_(False), state=state.requires_grad_(False))


def _choose_parts(options: ModelOptions, action_dim: int, looked_at: object) -> ChunkParts:
    """Join what the files tell and what the flags do."""
    num_steps = options.num_steps or (_ALOHA_STEPS if action_dim == _ALOHA_DIM else None)
    if num_steps is not None and options.num_pictures is not None:
        return ChunkParts(options.num_pictures, num_steps, action_dim)
    wanted = []
    if options.num_pictures is None:
        wanted.append(
            "--pictures N (1 is the frame alone, 2 adds a wrist camera as in LIBERO's published "
            "fine-tunes, 3 two of them as in ALOHA's)"
        )
    if num_steps is None:
        wanted.append("--chunk N (8 actions per answer in LIBERO's fine-tunes, 5 in Bridge's)")
    raise CheckpointError(
        f"{looked_at} tells that an action has {action_dim} numbers, but no file tells how the "
        f"model was trained otherwise; add {' and '.join(wanted)}"
    )
