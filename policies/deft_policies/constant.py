"""Policies with no model, for trying the server and its clients without a GPU."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deft_core.types import ActionChunk, ActOptions, Observation, ServerInfo
from deft_policies.base import OneCallPolicy, PolicyAnswer, PolicyRequest
from deft_policies.errors import UnknownDecodingError, UnknownStatisticsKeyError


@dataclass(eq=False)
class ConstantPolicy(OneCallPolicy):
    """Answers every observation with the same actions.

    One that sleeps takes a fixed time over every batch, however many frames it has, and no
    processor: to measure what surrounds a policy.
    """

    actions: NDArray[np.float64] = field(default_factory=lambda: np.zeros((1, 7)))
    name: str = "constant"
    sleep_s: float = 0.0

    @property
    def info(self) -> ServerInfo:
        """What the server advertises."""
        return ServerInfo(
            policy=self.name,
            action_dim=self.actions.shape[1],
            chunk_length=self.actions.shape[0],
            statistics_keys=("constant",),
            default_statistics_key="constant",
            image_height=224,
            image_width=224,
            image_chain="none",
            image_chains=("none",),
            decoding="constant",
            decoding_methods=("constant",),
        )

    def check(self, observation: Observation, options: ActOptions) -> None:
        """Refuse a statistics key or decoding method that is not `constant`."""
        if options.statistics_key not in (None, "constant"):
            raise UnknownStatisticsKeyError(options.statistics_key, ("constant",))
        if options.decoding not in (None, "constant"):
            raise UnknownDecodingError(options.decoding, ("constant",))

    def warm_up(self) -> None:
        """Nothing to warm."""

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        """Return the fixed actions."""
        time.sleep(self.sleep_s)
        return [PolicyAnswer(ActionChunk(self.actions), request.memory) for request in batch]
