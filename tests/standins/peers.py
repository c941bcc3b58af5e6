"""A policy with three data sets, as behind the captured frames, and an app around it."""

import base64
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_core.types import ActionChunk, ActOptions, Observation, ServerInfo
from deft_policies.base import OneCallPolicy, PolicyAnswer, PolicyRequest
from deft_policies.constant import ConstantPolicy
from deft_policies.errors import UnknownStatisticsKeyError
from deft_server.app import DeftApp, create_app
from deft_server.settings import Settings
from tests.standins.policies import counted

KEYS = ("libero_spatial", "lab_arm_no_noops", "bridge")


@dataclass(eq=False)
class ThreeDatasets(OneCallPolicy):
    """Answers with the action of the data set asked for; fails on the instruction `fail`."""

    actions: dict[str, NDArray[np.float64]] = field(
        default_factory=lambda: {
            key: np.linspace(-0.5, 0.25 * number, 7) for number, key in enumerate(KEYS)
        }
    )
    default_key: str | None = None
    steps: int = 1
    gate: threading.Event | None = None
    seen: list[Observation] = field(default_factory=list)
    num_sessions: int = 0

    @property
    def info(self) -> ServerInfo:
        return replace(
            ConstantPolicy().info,
            policy="three-datasets",
            chunk_length=self.steps,
            statistics_keys=KEYS,
            default_statistics_key=self.default_key,
        )

    def check(self, observation: Observation, options: ActOptions) -> None:
        self._key(options)

    def warm_up(self) -> None:
        """Nothing to warm."""

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        self.num_sessions += sum(one.memory.num_steps == 0 for one in batch)
        return [PolicyAnswer(self._answer(one), counted(one.memory)) for one in batch]

    def _answer(self, request: PolicyRequest) -> ActionChunk:
        if self.gate is not None:
            self.gate.wait(60)
        if request.observation.instruction == "fail":
            raise ValueError("deliberate failure")
        self.seen.append(request.observation)
        action = self.actions[self._key(request.options)]
        return ActionChunk(np.stack([action + 0.001 * step for step in range(self.steps)]))

    def _key(self, options: ActOptions) -> str:
        key = options.statistics_key or self.default_key
        if key is None or key not in self.actions:
            raise UnknownStatisticsKeyError(key, KEYS)
        return key


def build_app(policy: ThreeDatasets, settings: Settings | None = None) -> DeftApp:
    return create_app(policy, settings)


def npy(values: Any, **options: Any) -> str:
    """An array as VLA-0's clients send it: a NumPy file in base64."""
    file = BytesIO()
    np.save(file, values, **options)
    return base64.b64encode(file.getvalue()).decode()
