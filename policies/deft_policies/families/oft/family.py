"""OFT: pictures, state and instruction to a chunk of actions, in one pass.

What no file of a fine-tune says has to be said by flags.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deft_client.image_chain import ImageChain
from deft_client.types import DecodeTrace, Image, Observation, PassTrace
from deft_policies.checkpoint.config import EXTREMES, QUANTILES, parse_statistics
from deft_policies.checkpoint.open import Checkpoint, CheckpointSource, open_source
from deft_policies.decoding.batch import Form
from deft_policies.decoding.clock import Stage, StageClock
from deft_policies.errors import CheckpointError, NotFiniteError, RequestError
from deft_policies.families.action_tokens import RANGE_EPS, ActionCodec, unnormalise
from deft_policies.families.family import Family, OnePassModel, Opened, Values
from deft_policies.families.oft.chunk_model import ChunkModel, ChunkParts
from deft_policies.families.oft.files import (
    FilmTowers,
    OftFile,
    find_file,
    load_head,
    load_state_projector,
)
from deft_policies.families.oft.modules import RegressionHead, StateProjector
from deft_policies.families.options import OF_DECODING, OF_REASONING, ModelOptions
from deft_policies.families.target import (
    LONGEST_INSTRUCTION,
    Encode,
    choose_runner,
    load_network,
    named_sizes,
)
from deft_policies.model.image import ImageProcessor
from deft_policies.model.layout import StepRunner
from deft_policies.model.sizes import OpenVLAConfig
from deft_policies.model.statistics import ActionStatistics

METHOD = "parallel"
WRIST = "wrist"  # in the name of a camera that the model may look through
# Two arms, commanded by poses of their joints. Everything else is one arm commanded by motions.
_ALOHA_DIM = 14
_ALOHA_STEPS = 25
# What random weights imitate: LIBERO's published fine-tunes.
_NUM_HEAD_BLOCKS = 2
_STATE_DIM = 8


class Oft(OnePassModel):
    """Remembers nothing of a robot: a chunk depends on one observation alone."""

    family = "oft"
    method = METHOD

    def __init__(
        self,
        chunk: ChunkModel,
        encode: Encode,
        images: ImageProcessor,
        actions: Mapping[str, ActionStatistics],
        states: Mapping[str, ActionStatistics],
    ) -> None:
        """The statistics of actions and states are by key."""
        self.chunk, self.states = chunk, states
        self._codec = ActionCodec(chunk.model.config.vocabulary)
        super().__init__(chunk.model, encode, images, actions, chunk.runner)
        parts = chunk.parts
        # A head's values have no bounds; and poses, unlike motions, never stand still.
        self.may_exceed = parts.head is not None
        self.longest_prompt = chunk.longest_prompt
        self.num_steps = parts.num_steps
        self.num_pictures = parts.num_pictures
        self.state_dim = parts.state_dim
        self.details = {
            "head": "tokens, whole vocabulary" if parts.head is None else "L1 regression",
            "film": "no" if parts.film is None else "yes",
            "cameras": f"image and {parts.num_pictures - 1} whose names contain 'wrist'",
            "state": "not looked at" if parts.state is None else f"{parts.state_dim}, raw",
        }

    def form(self, key: str) -> Form:
        """A chunk."""
        return Form(self.chunk.parts.num_values)

    def decode(self, key: str, values: Values) -> NDArray[np.float64]:
        """The actions of a chunk."""
        if self.chunk.parts.head is None:
            normalised = self._codec.normalised(values.astype(np.int64))
            return unnormalise(normalised, self.statistics[key], RANGE_EPS)
        return unnormalise(values.astype(np.float32), self.statistics[key], RANGE_EPS)

    def check(self, observation: Observation) -> None:
        """Refuse missing cameras and states, and instructions without end."""
        self._find_pictures(observation)
        found, wanted = observation.state, self.state_dim
        if wanted is not None and (found is None or len(found) != wanted):
            got = "none" if found is None else f"{len(found)} numbers"
            raise RequestError(
                "state", f"the model reads the robot's raw state, {wanted} numbers; got {got}"
            )
        super().check(observation)

    def complete(self, observation: Observation) -> Observation:
        """Add the frame again for every wrist, and a state of zeros."""
        wrists = {f"{WRIST}_{index}": observation.image for index in range(self.num_pictures - 1)}
        state = None if self.state_dim is None else np.zeros(self.state_dim, np.float32)
        return replace(observation, cameras=wrists, state=state)

    def capture(self) -> None:
        """Record the towers and the pass."""
        self.chunk.capture()

    def answer(
        self, observations: Sequence[Observation], keys: Sequence[str], clock: StageClock
    ) -> list[tuple[Values, DecodeTrace | None]]:
        """Normalised actions of a head, or tokens and their trace, [step, action_dim] each."""
        chunk = self.chunk
        fitted = [
            self.images.fit(one) for seen in observations for one in self._find_pictures(seen)
        ]
        states = self._read_states(observations, keys)
        texts = [self.encode(one.instruction) for one in observations]
        clock.lap(Stage.PREPARE)
        pixels = self.pixels(fitted)
        prompts = chunk.lay_out(texts)
        patches = chunk.see(pixels.view(len(observations), -1, *pixels.shape[1:]), prompts)
        clock.lap(Stage.VISION)
        found = chunk.answer(patches, prompts, states)
        clock.lap(Stage.PREFILL)
        values, *margins = (one.cpu().numpy() for one in found)
        # Where logits are not finite, neither is the gap between the best two.
        if not all(np.isfinite(one).all() for one in (values, *margins)):
            raise NotFiniteError(
                "the model's answer holds NaN or infinity; its weights or its number format are "
                "broken"
            )
        if not margins:
            return [(row, None) for row in values]
        return [
            (grid, _trace(text, grid.flatten().tolist(), gaps.flatten().tolist()))
            for text, grid, gaps in zip(texts, values, margins[0], strict=True)
        ]

    def _find_pictures(self, observation: Observation) -> list[Image]:
        """The frame and the wrist cameras, as many as the model looks at."""
        num_wrists = self.num_pictures - 1
        if num_wrists == 0:
            return [observation.image]
        names = [name for name in observation.cameras if WRIST in name]
        if len(names) != num_wrists:
            raise RequestError(
                "cameras",
                f"the model looks at the frame and {num_wrists} further picture(s) whose names "
                f"contain {WRIST!r}; got {list(observation.cameras)}",
            )
        return [observation.image, *(observation.cameras[name] for name in names)]

    def _read_states(
        self, observations: Sequence[Observation], keys: Sequence[str]
    ) -> Tensor | None:
        if self.state_dim is None:
            return None
        rows = []
        for seen, key in zip(observations, keys, strict=True):
            assert seen.state is not None
            rows.append(normalise_state(seen.state.astype(np.float64), self.states[key]))
        return torch.from_numpy(np.array(rows, dtype=np.float32)).to(self.chunk.device)


def normalise_state(
    state: NDArray[np.float64], statistics: ActionStatistics
) -> NDArray[np.float64]:
    """A robot's raw state [state_dim], cut off at -1 and 1."""
    low, high = statistics.low, statistics.high
    squeezed = 2 * (state - low) / (high - low + RANGE_EPS) - 1
    return np.clip(np.where(statistics.mask, squeezed, state), -1.0, 1.0)


def _trace(text: Sequence[int], tokens: Sequence[int], gaps: Sequence[float]) -> DecodeTrace:
    """One pass with all tokens."""
    found = tuple(tokens)
    one = PassTrace(True, (text[-1],), (-1,), ("",), found[:1], (), found[0])
    return DecodeTrace(METHOD, found, found, tuple(gaps), (one,))


def _matches(source: CheckpointSource | None, options: ModelOptions) -> bool:
    """By the head beside the model; one that answers with tokens has no file of its own."""
    if options.num_pictures is not None or options.num_steps not in (None, 1):
        return True
    return source is not None and find_file(source.tuned, OftFile.HEAD) is not None


def _open(source: CheckpointSource | None, options: ModelOptions) -> Opened:
    """Raises `CheckpointError` for what is wrong, and for what no file tells."""
    if given := options.given(OF_DECODING, OF_REASONING):
        raise CheckpointError(
            f"{', '.join(given)}: an OFT model answers in one pass, nothing is drafted or written; "
            "leave it out"
        )
    return _open_random(options) if source is None else _open_files(source, options)


OFT = Family(Oft.family, _matches, _open)


def _opened(
    options: ModelOptions,
    config: OpenVLAConfig,
    parts: ChunkParts,
    states: Mapping[str, ActionStatistics],
    checkpoint: Checkpoint | None = None,
) -> Opened:
    """Where weights are drawn, so are those of the parts."""

    def load(device: torch.device, dtype: torch.dtype, runner: StepRunner | None) -> Oft:
        network, encode = load_network(checkpoint, options, device, dtype)
        own = parts if checkpoint else _drawn(parts, config.llm.width, options.seed, device)
        chunk = ChunkModel(network, own)
        reserve = chunk.reserve(LONGEST_INSTRUCTION, options.largest_batch)
        chunk.runner = runner or choose_runner(options, device, reserve)
        images = ImageProcessor(network.config.image, options.image_chain or ImageChain.OFT)
        return Oft(chunk, encode, images, config.statistics, states)

    summary = (
        f"oft: {parts.num_steps} actions of {parts.action_dim} from {parts.num_pictures} picture(s)"
    )
    return Opened(summary, config, load)


def _open_files(source: CheckpointSource, options: ModelOptions) -> Opened:
    directory, film = source.tuned, find_file(source.tuned, OftFile.VISION)
    if film is not None and source.overlay is not None:
        raise CheckpointError(
            f"{film} is of a fine-tune with FiLM, whose {source.overlay} cannot be merged here; "
            "merge it into its base with OFT's own script, and give the folder that this writes"
        )
    checkpoint = open_source(source)
    config = checkpoint.config
    head, towers = load_head(directory, config.llm.width), FilmTowers.load(directory)
    if towers is not None:
        towers.check(config)
        if head is None:
            raise CheckpointError(
                f"{film} is of a fine-tune with FiLM, which has a "
                f"*{OftFile.HEAD.value}*checkpoint* beside it; restore that file"
            )
        checkpoint = replace(checkpoint, merge=towers.merge)
    statistics = source.read_statistics()
    told_by = find_file(directory, OftFile.HEAD) or statistics.path
    dims = {one.action_dim for one in config.statistics.values()}
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
        found = states[key].action_dim if key in states else 0
        if parts.state_dim not in (None, found):
            raise CheckpointError(
                f"{statistics.path}: {key}.proprio has {found} dimensions, but "
                f"{find_file(directory, OftFile.STATE)} reads {parts.state_dim}; restore the files "
                "of one fine-tuning run"
            )
    return _opened(options, replace(config, statistics=actions), parts, states, checkpoint)


def _open_random(options: ModelOptions) -> Opened:
    """Sizes of a model with a head that reads a state, whose answers will be noise."""
    config = named_sizes(options.random_weights)
    (key, statistics), *_ = config.statistics.items()
    looked_at = f"--random-weights {options.random_weights}"
    parts = _choose_parts(options, statistics.action_dim, looked_at)
    ones = np.ones(_STATE_DIM)
    states = {key: ActionStatistics(-ones, ones, ones > 0)}
    return _opened(options, replace(config, statistics={key: statistics}), parts, states)


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
