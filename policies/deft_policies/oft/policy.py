"""OFT behind the `Policy` interface: pictures, state and instruction in, a chunk of actions out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from deft_client.types import (
    ActionChunk,
    ActOptions,
    DecodeTrace,
    Image,
    Observation,
    PassTrace,
    ServerInfo,
)
from deft_policies.base import ActAnswer, ActionLimits, ActRequest
from deft_policies.decoding.records import Stage, StageClock
from deft_policies.errors import (
    DeviceError,
    NotFiniteError,
    RequestError,
    UnknownDecodingError,
    UnusableObservationError,
)
from deft_policies.model.image import ImageProcessor
from deft_policies.model.statistics import find_statistics_key
from deft_policies.oft.chunk_model import ChunkModel, ChunkValues
from deft_policies.oft.ranges import RobotRanges
from deft_policies.openvla.action_codec import ActionCodec
from deft_policies.openvla.policy import PromptSource
from deft_policies.self_test import self_test

METHOD = "parallel"
# What a camera's name contains if the model may look through it.
WRIST = "wrist"


@dataclass(frozen=True, eq=False)
class OftParts:
    """What a policy is joined from."""

    model: ChunkModel
    encoder: PromptSource
    images: ImageProcessor
    ranges: Mapping[str, RobotRanges]
    is_absolute: bool  # actions are poses, not motions


@dataclass(frozen=True)
class OftSettings:
    """What a policy does where a request does not say otherwise, and what it says of itself."""

    statistics_key: str | None = None
    versions: tuple[tuple[str, str], ...] = ()
    details: tuple[tuple[str, str], ...] = ()


class OftPolicy:
    """Answers batches of observations in one pass, whatever their instructions.

    Remembers nothing of a robot: a chunk depends on one observation alone.
    """

    def __init__(self, parts: OftParts, settings: OftSettings | None = None) -> None:
        self._parts = parts
        self._settings = settings or OftSettings()
        self._codec = ActionCodec(parts.model.model.config.vocabulary)
        self._encode = lru_cache(maxsize=256)(parts.encoder.encode)
        self._keys = tuple(parts.ranges)
        self._default_key = self._find_default_key()

    @property
    def parts(self) -> OftParts:
        """What it was joined from, for measuring."""
        return self._parts

    @property
    def info(self) -> ServerInfo:
        """What the server advertises."""
        parts, shape = self._parts, self._parts.model.shape
        size = parts.model.model.config.image.size
        return ServerInfo(
            policy="oft",
            action_dim=shape.action_dim,
            chunk_length=shape.num_steps,
            statistics_keys=self._keys,
            default_statistics_key=self._default_key,
            image_height=size,
            image_width=size,
            image_chain=parts.images.chain.value,
            image_chains=tuple(chain.value for chain in type(parts.images.chain)),
            decoding=METHOD,
            decoding_methods=(METHOD,),
            num_pictures=shape.num_pictures,
            state_dim=shape.state_dim,
            versions=dict(self._settings.versions),
            details=dict(self._settings.details),
        )

    def action_limits(self, statistics_key: str | None) -> ActionLimits:
        """The range of the statistics, which answers of a head may exceed.

        Of motions, all dimensions but the last (the gripper) stand still at zero; poses never do.
        """
        ranges = self._parts.ranges[self.find_key(statistics_key)].action
        is_motion = np.arange(len(ranges.mask)) < len(ranges.mask) - 1
        return ActionLimits(
            low=np.where(ranges.mask, ranges.low, -1.0),
            high=np.where(ranges.mask, ranges.high, 1.0),
            is_motion=is_motion & (not self._parts.is_absolute),
            may_exceed=self._parts.model.parts.head is not None,
        )

    def check(self, observation: Observation, options: ActOptions) -> None:
        """Refuse unknown keys and methods, missing cameras and states, and endless instructions."""
        self.find_key(options.statistics_key)
        if options.decoding not in (None, METHOD):
            raise UnknownDecodingError(options.decoding, (METHOD,))
        if options.radius is not None:
            raise RequestError("radius", "nothing is drafted, so there is no radius; leave it out")
        self._find_pictures(observation)
        self._check_state(observation)
        room, num_ids = self._parts.model.longest_prompt, len(self._encode(observation.instruction))
        if num_ids > room:
            raise UnusableObservationError(
                "instruction",
                f"the prompt has {num_ids} tokens, at most {room} fit beside the pictures; "
                "shorten the instruction",
            )

    def warm_up(self) -> None:
        """Capture passes, where they are captured, for good; then answer known frames as a test."""
        model = self._parts.model
        with model.runner.warming_up(), torch.inference_mode():
            model.capture()
        self_test(self, None, complete=self.complete)  # a head may answer beyond the statistics

    def complete(self, observation: Observation) -> Observation:
        """Add what the model reads beside a frame: it again for every wrist, a state of zeros."""
        shape = self._parts.model.shape
        wrists = {f"{WRIST}_{index}": observation.image for index in range(shape.num_pictures - 1)}
        state = None if shape.state_dim is None else np.zeros(shape.state_dim, np.float32)
        return replace(observation, cameras=wrists, state=state)

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        """Answer a batch, in order."""
        try:
            with torch.inference_mode():
                return self._answer(batch)
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"no memory for a batch of {len(batch)}: {error}") from error

    def _answer(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        parts, model = self._parts, self._parts.model
        clock = StageClock(model.device)
        fitted = [
            parts.images.fit(picture)
            for request in batch
            for picture in self._find_pictures(request.observation)
        ]
        ranges = [parts.ranges[self.find_key(one.options.statistics_key)] for one in batch]
        states = self._read_states(batch, ranges)
        texts = [self._encode(request.observation.instruction) for request in batch]
        clock.lap(Stage.PREPARE)
        dtype = model.model.decoder.embedding.weight.dtype
        pixels = parts.images.pixel_values(fitted, model.device, dtype)
        prompts = model.lay_out(texts)
        patches = model.see(pixels.view(len(batch), -1, *pixels.shape[1:]), prompts)
        clock.lap(Stage.VISION)
        values = model.answer(patches, prompts, states)
        clock.lap(Stage.PREFILL)
        normalised = self._read_values(values)
        traces = _read_traces(values, texts)
        chunks = [one.action.unnormalise(row) for one, row in zip(ranges, normalised, strict=True)]
        clock.lap(Stage.FINISH)
        timings = clock.timings()
        return [
            ActAnswer(ActionChunk(actions, timings, trace), request.memory)
            for request, actions, trace in zip(batch, chunks, traces, strict=True)
        ]

    def _read_values(self, values: ChunkValues) -> NDArray[np.floating]:
        """Normalised actions [row, step, action_dim]: float32 of a head, float64 of tokens."""
        if values.actions is not None:
            found: NDArray[np.float32] = values.actions.cpu().numpy()
            _require_finite(found)
            return found
        assert values.tokens is not None
        return self._codec.normalised(values.tokens.cpu().numpy())

    def _find_pictures(self, observation: Observation) -> list[Image]:
        """The frame and the wrist cameras, as many as the model looks at."""
        num_wrists = self._parts.model.shape.num_pictures - 1
        if num_wrists == 0:
            return [observation.image]
        names = [name for name in observation.cameras if WRIST in name]
        if len(names) != num_wrists:
            raise UnusableObservationError(
                "cameras",
                f"the model looks at the frame and {num_wrists} further picture(s) whose names "
                f"contain {WRIST!r}; got {list(observation.cameras)}",
            )
        return [observation.image, *(observation.cameras[name] for name in names)]

    def _check_state(self, observation: Observation) -> None:
        wanted = self._parts.model.shape.state_dim
        if wanted is None:
            return
        if observation.state is None or len(observation.state) != wanted:
            found = "none" if observation.state is None else f"{len(observation.state)} numbers"
            raise UnusableObservationError(
                "state", f"the model reads the robot's raw state, {wanted} numbers; got {found}"
            )

    def _read_states(
        self, batch: Sequence[ActRequest], ranges: Sequence[RobotRanges]
    ) -> Tensor | None:
        if self._parts.model.shape.state_dim is None:
            return None
        rows = []
        for request, one in zip(batch, ranges, strict=True):
            assert request.observation.state is not None
            assert one.state is not None
            rows.append(one.state.normalise_state(request.observation.state.astype(np.float64)))
        return torch.from_numpy(np.array(rows, dtype=np.float32)).to(self._parts.model.device)

    def find_key(self, key: str | None) -> str:
        """The statistics key meant by a request that names this one, or none."""
        return find_statistics_key(self._keys, key if key is not None else self._default_key)

    def _find_default_key(self) -> str | None:
        given = self._settings.statistics_key
        if given is None and len(self._keys) != 1:
            return None  # every request has to name one
        return find_statistics_key(self._keys, given)


def _require_finite(values: ArrayLike) -> None:
    if not np.isfinite(values).all():
        raise NotFiniteError(
            "the model's answer holds NaN or infinity; its weights or its number format are broken"
        )


def _read_traces(
    values: ChunkValues, texts: Sequence[Sequence[int]]
) -> list[DecodeTrace] | list[None]:
    """One pass per row with all its tokens; nothing to tell of a head's numbers."""
    if values.tokens is None or values.margins is None:
        return [None] * len(texts)
    tokens, margins = values.tokens.flatten(1).tolist(), values.margins.flatten(1).tolist()
    _require_finite(margins)  # the gap to the second-best of logits that are not is not either
    traces = []
    for text, row, gaps in zip(texts, tokens, margins, strict=True):
        one = PassTrace(True, (text[-1],), (-1,), ("",), (row[0],), (), row[0])
        traces.append(DecodeTrace(METHOD, tuple(row), tuple(row), tuple(gaps), (one,)))
    return traces
