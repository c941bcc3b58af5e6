"""OpenVLA behind the `Policy` interface: frames and instructions in, actions and traces out."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deft_client.types import ActionChunk, ActOptions, DecodeTrace, Image, Observation, ServerInfo
from deft_policies.base import ActAnswer, ActionLimits, ActRequest
from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.autoregressive import AUTOREGRESSIVE
from deft_policies.decoding.decoder import Decoder, DecodeRow, DraftModels, build_decoder
from deft_policies.decoding.history import ActionHistory
from deft_policies.decoding.knobs import find_method, method_names, turned
from deft_policies.decoding.methods import DEFAULT_METHOD, Method
from deft_policies.decoding.records import Stage, StageClock
from deft_policies.decoding.sampling import Sampling
from deft_policies.decoding.target import Prompts
from deft_policies.errors import DeviceError, RequestError, UnusableObservationError
from deft_policies.model.image import ImageProcessor
from deft_policies.model.statistics import ActionStatistics, find_statistics_key
from deft_policies.model.vla import digest_of
from deft_policies.openvla.action_codec import ActionCodec, RobotScale
from deft_policies.openvla.target import OpenVLATarget
from deft_policies.self_test import self_test

_log = logging.getLogger(__name__)
CPU = torch.device("cpu")
_DECODERS_KEPT = 128  # of studies all; callers may ask for any radius


class PromptSource(Protocol):
    """Turns an instruction into the ids the decoder reads around the patches."""

    def encode(self, instruction: str) -> Sequence[int]:
        """Ids of the whole prompt. May be called from any thread."""


@dataclass(frozen=True, eq=False)
class PolicyParts:
    """What a policy is joined from."""

    target: OpenVLATarget
    encoder: PromptSource
    images: ImageProcessor
    statistics: Mapping[str, ActionStatistics]
    drafts: DraftModels = field(default_factory=DraftModels)
    draft: "PolicyParts | None" = None  # another checkpoint that drafts

    @cached_property
    def encode(self) -> Callable[[str], Sequence[int]]:
        """The encoder, remembering the instructions of late. May be called from any thread."""
        return lru_cache(maxsize=256)(self.encoder.encode)

    def pixels(self, fitted: Sequence[Image]) -> Tensor:
        """Fitted images as the towers read them, [row, ...]."""
        weight = self.target.decoder.embedding.weight
        return self.images.pixel_values(fitted, weight.device, weight.dtype)

    def check(self, instruction: str) -> None:
        """Raise `UnusableObservationError` for one that is too long for any of its models."""
        room = self.target.longest_prompt - self.target.model.config.num_patches
        num_ids = len(self.encode(instruction))
        if num_ids > room:
            raise UnusableObservationError(
                "instruction",
                f"the prompt has {num_ids} tokens, at most {room} fit beside the image; "
                "shorten the instruction",
            )
        if self.draft is not None:
            self.draft.check(instruction)

    def read(self, observations: Sequence[Observation], clock: StageClock) -> Prompts:
        """What the decoder starts from, timed as preparing and as vision."""
        fitted = [self.images.fit(one.image) for one in observations]
        ids = [self.encode(one.instruction) for one in observations]
        clock.lap(Stage.PREPARE)
        prompts = self.target.read(self.pixels(fitted), ids)
        clock.lap(Stage.VISION)
        if self.draft is None:
            return prompts
        # Asked for by what drafts, where its time counts as drafting.
        apart = StageClock(CPU)
        return replace(prompts, for_draft=partial(self.draft.read, observations, apart))


@dataclass(frozen=True)
class PolicySettings:
    """What a policy does where a request does not say otherwise.

    `sampling` holds for every method that a request may name, and so does `is_guarded` where false.
    """

    statistics_key: str | None = None
    method: Method = field(default_factory=lambda: find_method(DEFAULT_METHOD))
    sampling: Sampling = Sampling()
    is_guarded: bool = True
    versions: tuple[tuple[str, str], ...] = ()
    details: tuple[tuple[str, str], ...] = ()
    name: str = "openvla"


@dataclass(frozen=True)
class _Row:
    """One request with everything looked up."""

    request: ActRequest
    key: str
    statistics: ActionStatistics
    decoder: Decoder


class OpenVLAPolicy:
    """Answers batches of observations. Further cameras and the robot's state are not looked at."""

    def __init__(self, parts: PolicyParts, settings: PolicySettings | None = None) -> None:
        self._parts = parts
        self._settings = settings or PolicySettings()
        self._codec = ActionCodec(parts.target.model.config.vocabulary)
        self._find_decoder = lru_cache(maxsize=_DECODERS_KEPT)(self._build_decoder)
        self._keys = tuple(parts.statistics)
        self._spaces = {
            key: self._codec.action_space(statistics, RobotScale.of_statistics(key))
            for key, statistics in parts.statistics.items()
        }
        self._default_key = self._find_default_key()
        self._decoder_for(ActOptions())

    @property
    def parts(self) -> PolicyParts:
        """What it was joined from."""
        return self._parts

    @property
    def settings(self) -> PolicySettings:
        """What it does where a request does not say otherwise."""
        return self._settings

    @property
    def info(self) -> ServerInfo:
        """What the server advertises."""
        size = self._parts.target.model.config.image.size
        training = self._parts.target.model.config.training
        statistics = self._parts.statistics[self._default_key or self._keys[0]]
        chains = type(self._parts.images.chain)
        return ServerInfo(
            policy=self._settings.name,
            action_dim=statistics.action_dim,
            chunk_length=1,
            statistics_keys=self._keys,
            default_statistics_key=self._default_key,
            image_height=size,
            image_width=size,
            image_chain=self._parts.images.chain.value,
            image_chains=tuple(chain.value for chain in chains),
            decoding=self._settings.method.name,
            decoding_methods=tuple(name for name in method_names() if self.has_method(name)),
            instructions=training.instructions,
            assets=training.assets,
            versions=dict(self._settings.versions),
            details={**dict(self._settings.details), **self._settings.method.described()},
        )

    def fingerprint(self) -> str:
        """A digest of its weights and of those that draft."""
        drafts, draft = self._parts.drafts, self._parts.draft
        heads = (drafts.head, drafts.medusa, None if draft is None else draft.target.model)
        return digest_of(self._parts.target.model, *(one for one in heads if one is not None))

    def action_limits(self, statistics_key: str | None) -> ActionLimits:
        """The range of the statistics; the last dimension is the gripper."""
        statistics = self._parts.statistics[self.find_key(statistics_key)]
        is_motion = np.arange(statistics.action_dim) < statistics.action_dim - 1
        return ActionLimits(statistics.lowest, statistics.highest, is_motion)

    def has_method(self, name: str, radius: int | None = None) -> bool:
        """Whether a request may ask for this method, with this radius."""
        try:
            self._decoder_for(ActOptions(decoding=name, radius=radius))
        except RequestError:
            return False
        return True

    def action_space(self, statistics_key: str | None) -> ActionSpace:
        """What one bin means to the robot under a statistics key; None is the default."""
        return self._spaces[self.find_key(statistics_key)]

    def check(self, observation: Observation, options: ActOptions) -> None:
        """Refuse unknown statistics keys and methods, bad radii and endless instructions."""
        self.find_key(options.statistics_key)
        self._decoder_for(options)
        self._parts.check(observation.instruction)

    def warm_up(self, methods: Sequence[str] | None = None) -> None:
        """Answer a black frame by every way the default method may take, to learn what they cost.

        Where steps are captured, capture before that all that any batch or prompt within the
        reserve can need by the default and these `methods`, else by every method there is: nothing
        is captured afterwards. Then known frames are answered as a test.
        """
        if methods is None:
            methods = [name for name in method_names() if self.has_method(name)]
        runner = self._parts.target.runner
        with runner.warming_up(), torch.inference_mode():
            if runner.reserve is not None:
                _log.info("capturing passes of up to %d rows", runner.reserve.rows)
            self._parts.target.warm_up()
            self.capture(methods)
            self._learn_costs()
        key = self._default_key or self._keys[0]
        self_test(self, self.action_limits(key), plain_method=AUTOREGRESSIVE)

    def capture(self, names: Sequence[str]) -> None:
        """Capture all that these methods and the default can need, for any batch in the reserve."""
        started, reserve = time.perf_counter(), self._parts.target.runner.reserve
        if reserve is None:
            return
        batches = [self._blank_prompts(rows) for rows in reserve.batches]
        spaces = {space.length: space for space in self._spaces.values()}
        every = dict.fromkeys((self._settings.method.name, *names))
        for index, name in enumerate(every):
            seconds = time.perf_counter() - started
            left = (
                f"about {seconds / index * (len(every) - index):.0f} s to go" if index else "first"
            )
            _log.info("capturing rounds of %s (%d of %d): %s", name, index + 1, len(every), left)
            for space in spaces.values():
                self._decoder_for(ActOptions(decoding=name)).capture(batches, space)
        _log.info("everything captured in %.0f s", time.perf_counter() - started)

    def _learn_costs(self) -> None:
        space = self.action_space(self._default_key or self._keys[0])
        self._decoder_for(ActOptions()).warm_up(self._blank_prompts(1), [space])

    def _blank_prompts(self, rows: int) -> Prompts:
        """What a batch of black frames starts from."""
        size = self._parts.target.model.config.image.size
        black = Observation(np.zeros((size, size, 3), dtype=np.uint8), "pick up the cup")
        return self._parts.read([black] * rows, StageClock(CPU))

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        """Answer a batch, in order."""
        try:
            with torch.inference_mode():
                return self._answer([self._look_up(request) for request in batch])
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"no memory for a batch of {len(batch)}: {error}") from error

    def _answer(self, rows: list[_Row]) -> list[ActAnswer]:
        clock = StageClock(self._parts.target.device)
        prompts = self._parts.read([row.request.observation for row in rows], clock)
        histories = [ActionHistory.of(row.request.memory) for row in rows]
        traces = self._decode(rows, histories, prompts, clock)
        clock.skip()
        actions = [
            self._codec.decode(np.array([trace.tokens]), row.statistics)
            for row, trace in zip(rows, traces, strict=True)
        ]
        clock.lap(Stage.FINISH)
        timings = clock.timings()
        return [
            ActAnswer(ActionChunk(action, timings, trace), history.memory(row.request.memory))
            for row, action, trace, history in zip(rows, actions, traces, histories, strict=True)
        ]

    def _decode(
        self,
        rows: list[_Row],
        histories: list[ActionHistory],
        prompts: Prompts,
        clock: StageClock,
    ) -> list[DecodeTrace]:
        """Rows that decode alike go together, almost always all of them."""
        groups: dict[tuple[Decoder, int], list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault((row.decoder, row.statistics.action_dim), []).append(index)
        traces: dict[int, DecodeTrace] = {}
        for (decoder, _), members in groups.items():
            decode_rows = [
                DecodeRow(histories[index], self._spaces[rows[index].key]) for index in members
            ]
            wants = any(rows[index].request.options.want_trace for index in members)
            chosen = prompts if len(groups) == 1 else _take(prompts, members)
            found = decoder.decode(chosen, decode_rows, clock, wants)
            traces.update(zip(members, found, strict=True))
        return [traces[index] for index in range(len(rows))]

    def _look_up(self, request: ActRequest) -> _Row:
        key = self.find_key(request.options.statistics_key)
        decoder = self._decoder_for(request.options)
        return _Row(request, key, self._parts.statistics[key], decoder)

    def _decoder_for(self, options: ActOptions) -> Decoder:
        """The decoder of what a request asks for, or of the default; may raise `RequestError`."""
        name = options.decoding or self._settings.method.name
        return self._find_decoder(name, options.radius)

    def _build_decoder(self, name: str, radius: int | None) -> Decoder:
        """May run on any thread. What callers changed about the default is for that one alone."""
        settings = self._settings
        default = settings.method
        base, _, knobs = name.partition(":")
        if base == default.name.partition(":")[0]:
            method = turned(default, knobs) if name != default.name else default
        else:
            method = find_method(name)
        if radius is not None:
            method = method.with_radius(radius)
        method = method.with_sampling(settings.sampling)
        if not settings.is_guarded:
            method = replace(method, is_guarded=False)
        return build_decoder(self._parts.target, method, self._parts.drafts)

    def find_key(self, key: str | None) -> str:
        """The statistics key meant by a request that names this one, or none."""
        return find_statistics_key(self._keys, key if key is not None else self._default_key)

    def _find_default_key(self) -> str | None:
        given = self._settings.statistics_key
        if given is None and len(self._keys) != 1:
            return None  # every request has to name one
        return find_statistics_key(self._keys, given)


def _take(prompts: Prompts, rows: list[int]) -> Prompts:
    index = torch.tensor(rows, device=prompts.embeds.device)
    features, for_draft = prompts.features, prompts.for_draft
    return replace(
        prompts,
        embeds=prompts.embeds[index],
        lengths=prompts.lengths[index],
        last_tokens=prompts.last_tokens[index],
        features=None if features is None else features[index],
        for_draft=None if for_draft is None else lambda: _take(for_draft(), rows),
    )
