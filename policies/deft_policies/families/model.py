"""What a model of any family is.

A model says what it looks at and what its answers are; `families.policy` does the rest, the same
for all that answer token by token. How files become a model is said in `families.family`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deft_core.image_chain import ImageChain
from deft_core.types import Image, Observation
from deft_policies.base import ActionLimits
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.planner import WIDEST
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.target import Prompt, Target
from deft_policies.errors import RequestError
from deft_policies.model.graphs import StepRunner
from deft_policies.model.image import ImageProcessor
from deft_policies.model.statistics import ActionStatistics
from deft_policies.model.vla import VlaNetwork

Encode = Callable[[str], Sequence[int]]  # an instruction to the ids of the whole prompt
WRIST = "wrist"  # in the name of a camera that a model may look through


class Model(ABC):
    """A loaded model of some family."""

    family: str
    longest_prompt: int  # ids that a prompt may have
    may_exceed = False  # whether its actions may lie beyond the statistics

    def __init__(
        self,
        network: VlaNetwork,
        encode: Encode,
        images: ImageProcessor | None,
        statistics: Mapping[str, ActionStatistics],
        runner: StepRunner,
    ) -> None:
        """`statistics` are of actions, by key. `encode` may be called from any thread.

        Without `images` it makes its pictures of frames itself.
        """
        self.network = network
        self.images = images
        self.statistics = statistics
        self.runner = runner
        self.details: dict[str, str] = {}  # for people
        self.num_steps = 1  # actions per answer
        self.num_pictures = 1  # the frame, then wrist cameras
        self.state_dim: int | None = None  # numbers of the robot's state it reads
        self.encode: Encode = lru_cache(maxsize=256)(encode)  # the instructions of late

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.network.decoder.embedding.weight.device

    @property
    def image_chains(self) -> tuple[ImageChain, ...]:
        """What may be done to a frame before it is looked at; what is done here comes first."""
        if self.images is None:
            return (ImageChain.NONE,)
        ours = self.images.chain
        return ours, *(chain for chain in ImageChain if chain is not ours)

    def limits(self, key: str) -> ActionLimits:
        """The range of actions under a statistics key; the last dimension is the gripper."""
        statistics = self.statistics[key]
        return ActionLimits(statistics.lowest, statistics.highest, self.may_exceed)

    def pixels(self, fitted: Sequence[Image]) -> Tensor:
        """Fitted images as the towers read them, [row, ...]."""
        weight = self.network.decoder.embedding.weight
        assert self.images is not None
        return self.images.pixel_values(fitted, weight.device, weight.dtype)

    @property
    def camera_names(self) -> list[str]:
        """Names of the cameras besides the frame's, in the order in which the model reads them."""
        if self.num_pictures == 2:
            return [WRIST]
        return [f"{WRIST}_{index}" for index in range(self.num_pictures - 1)]

    def check(self, observation: Observation) -> None:
        """Raise `RequestError` for what it was not made to look at."""
        self.pictures(observation)
        num_ids = len(self.encode(observation.instruction))
        if num_ids > self.longest_prompt:
            beside = "image" if self.num_pictures == 1 else "pictures"
            raise RequestError(
                "instruction",
                f"the prompt has {num_ids} tokens, at most {self.longest_prompt} fit with the "
                f"{beside}; shorten the instruction",
            )

    def pictures(self, observation: Observation) -> list[Image]:
        """The frame and the wrist cameras, as many as it looks at."""
        num_wrists = self.num_pictures - 1
        if num_wrists == 0:
            return [observation.image]
        names = [name for name in observation.cameras if WRIST in name]
        if set(names) == set(self.camera_names):
            names = self.camera_names
        if len(names) != num_wrists:
            raise RequestError(
                "cameras",
                f"the model looks at the frame and at {num_wrists} further picture(s), "
                f"{' and '.join(self.camera_names)} or others whose names contain {WRIST!r}; got "
                f"{list(observation.cameras)}",
            )
        return [observation.image, *(observation.cameras[name] for name in names)]

    def complete(self, observation: Observation) -> Observation:
        """Add what it lacks: the frame again for every camera, and a state of zeros."""
        if not observation.cameras and self.camera_names:
            cameras = dict.fromkeys(self.camera_names, observation.image)
            observation = replace(observation, cameras=cameras)
        if self.state_dim is not None and observation.state is None:
            observation = replace(observation, state=np.zeros(self.state_dim, np.float32))
        return observation

    @abstractmethod
    def capture(self) -> None:
        """Record what a batch within the runner's reserve can need, decoding apart."""


class TokenModel(Model):
    """A model that answers token by token: what it sees is where decoding starts."""

    target: Target
    widest = WIDEST  # nodes of a draft tree
    reasoning_model: "TokenModel | None" = None  # the same weights, asked to think before they act
    draft: "TokenModel | None" = None  # another checkpoint that drafts
    cuts_answers = True  # at `max_tokens`; with a grammar an answer is as long as its action

    @cached_property
    def specs(self) -> dict[str, AnswerSpec]:
        """What an answer is, by statistics key."""
        return {key: self.spec(key) for key in self.statistics}

    @abstractmethod
    def spec(self, key: str) -> AnswerSpec:
        """What an answer under a statistics key is."""

    @abstractmethod
    def decode(self, key: str, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Actions [step, action_dim] in robot units; raises `NoActionError` where it holds none."""

    def for_robot(
        self, actions: NDArray[np.float64], observation: Observation
    ) -> NDArray[np.float64]:
        """Actions as the robot takes them, where they depend on what it has reported."""
        return actions

    @abstractmethod
    def draft_with(self, draft: Model) -> None:
        """Have another checkpoint draft; raises `CheckpointError` unless it can."""

    def read_text(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]] | None:
        """An answer as text, and how many tokens each of its parts has; None where it has none."""
        return None

    def coefficients(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Of an action in FAST codes, those that begin in each token; empty of other answers."""
        return []

    def decode_begun(self, key: str, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Actions that the beginning of an answer already holds, [step, action_dim]."""
        return np.empty((0, self.statistics[key].action_dim))

    @abstractmethod
    def see(self, observations: Sequence[Observation], clock: StageClock) -> list[Prompt]:
        """What the decoder starts from, timed as preparing and as vision."""
