"""A policy with no model that decodes by rolling dice, and tells everything about it."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from deft_core.types import (
    ActionChunk,
    ActOptions,
    DecodeTrace,
    Observation,
    PassTrace,
    ServerInfo,
    StageTimings,
)
from deft_policies.base import OneCallPolicy, PolicyAnswer, PolicyRequest
from deft_policies.constant import ConstantPolicy
from tests.standins.policies import counted

LENGTH = 7
FIRST_TOKEN = 500
SOURCES = ("previous", "head", "extrapolation")


class TalkativePolicy(OneCallPolicy):
    """Moves along smooth curves; `relaxed` accepts near misses, `lossless` does not."""

    def __init__(self, seed: int = 7, busy_s: float = 0.0) -> None:
        self._rng = np.random.default_rng(seed)
        self._busy_s = busy_s

    @property
    def info(self) -> ServerInfo:
        return replace(
            ConstantPolicy().info,
            policy="talkative",
            statistics_keys=("lab", "kitchen"),
            default_statistics_key="lab",
            decoding="lossless",
            decoding_methods=("lossless", "relaxed", "autoregressive"),
        )

    def check(self, observation: Observation, options: ActOptions) -> None:
        """Everything goes."""

    def warm_up(self) -> None:
        """Nothing to warm."""

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        if self._busy_s:
            time.sleep(self._busy_s * len(batch))
        return [PolicyAnswer(self._answer(one), counted(one.memory)) for one in batch]

    def _answer(self, request: PolicyRequest) -> ActionChunk:
        method = request.options.decoding or "lossless"
        trace = self._decode(method)
        phase = counted(request.memory).num_steps / 12
        action = 0.4 * np.sin(phase * np.arange(1, 8) / 2)
        action[-1] = 1.0 if np.sin(phase / 2) > 0 else 0.0
        verify = sum(one.pass_ms for one in trace.passes if not one.is_prefill)
        timings = StageTimings(
            prepare_ms=1.1,
            vision_ms=2.4,
            prefill_ms=trace.passes[0].pass_ms,
            draft_ms=sum(one.draft_ms for one in trace.passes),
            verify_ms=verify,
            commit_ms=0.2,
            finish_ms=0.1,
        )
        return ActionChunk(action[None], timings, trace if request.options.want_trace else None)

    def _decode(self, method: str) -> DecodeTrace:
        target = [
            int(token) for token in self._rng.integers(FIRST_TOKEN, FIRST_TOKEN + 256, LENGTH)
        ]
        executed: list[int] = []
        passes: list[PassTrace] = []
        while len(executed) < LENGTH:
            missing = target[len(executed) :]
            width = 0 if method == "autoregressive" else min(len(missing), 4)
            one, kept = self._pass(missing, width, method == "relaxed", not passes)
            passes.append(one)
            executed += [*kept, one.bonus][: len(missing)]
        return DecodeTrace(
            method=method,
            tokens=tuple(executed),
            predicted=tuple(target),
            margins=tuple(self._rng.uniform(0.1, 4, LENGTH).tolist()),
            passes=tuple(passes),
        )

    def _pass(
        self, missing: list[int], depth: int, relaxed: bool, is_prefill: bool
    ) -> tuple[PassTrace, list[int]]:
        """Draft two or three tokens per level; the first is right most of the time."""
        tokens, parents, sources, path, kept = [FIRST_TOKEN], [-1], [""], [], []
        tip, alive = 0, True
        for level in range(depth):
            near = missing[level] + int(self._rng.integers(1, 4))
            right = self._rng.random() < 0.62
            first = missing[level] if right else near
            below = len(tokens)
            for offset, guess in enumerate((first, first + 9, first - 14)[: 3 - level // 2]):
                tokens.append(guess)
                parents.append(tip)
                sources.append(SOURCES[offset])
            alive = alive and (right or (relaxed and self._rng.random() < 0.6))
            if alive:
                path.append(below)
                kept.append(first)
            tip = below
        bonus = missing[len(kept)] if len(kept) < len(missing) else FIRST_TOKEN
        one = PassTrace(
            is_prefill=is_prefill,
            tokens=tuple(tokens),
            parents=tuple(parents),
            sources=tuple(sources),
            predictions=tuple(token + 1 for token in tokens),
            path=tuple(path),
            bonus=bonus,
            draft_ms=0.15 * depth,
            pass_ms=5.3 if is_prefill else 3.2 + 0.2 * self._rng.random(),
        )
        return one, kept
