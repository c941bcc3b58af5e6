"""Limits of a run on this device: what its passes must read and compute, over measured rates."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deft_client.types import DecodeTrace
from deft_policies.benchmark.cost import (
    Cost,
    PassTokens,
    WeightBytes,
    decoder_cost,
    vision_cost,
)
from deft_policies.benchmark.frames import Frame
from deft_policies.benchmark.runs import DeviceRates, Run
from deft_policies.openvla.policy import OpenVLAPolicy

_NOTHING = Cost(0.0, 0.0)


@dataclass(frozen=True)
class StageLimit:
    """Mean over a run's actions. `floor_ms` adds up passes, each bound by what bounds it."""

    cost: Cost
    floor_ms: float


@dataclass(frozen=True)
class Roofline:
    """Limits of the stages that touch weights; the other stages have none to speak of."""

    stages: dict[str, StageLimit]

    @property
    def total_ms(self) -> float:
        """The sum of the stages' limits."""
        return sum(stage.floor_ms for stage in self.stages.values())


@dataclass(frozen=True, eq=False)
class CostModel:
    """What the passes of one policy cost."""

    policy: OpenVLAPolicy
    weights: WeightBytes
    rates: DeviceRates

    def roofline(self, run: Run, frames: Sequence[Frame]) -> Roofline:
        """The limits of what a run did, pass by pass."""
        prefill, decode = [], []
        for frame, answer in zip(frames, run.answers, strict=True):
            passes = self._passes(frame, answer.chunk.trace, run.contender.batch_size)
            prefill.append(self._limit(passes[:1]))
            decode.append(self._limit(passes[1:]))
        config = self.policy.parts.target.model.config
        vision = vision_cost(config, run.contender.batch_size, self.weights)
        return Roofline(
            {
                "vision": self._limit([vision]),
                "prefill": _mean(prefill),
                "decode": _mean(decode),
            }
        )

    def _passes(self, frame: Frame, trace: DecodeTrace | None, num_rows: int) -> list[Cost]:
        parts = self.policy.parts
        config = parts.target.model.config
        prompt = len(parts.encoder.encode(frame.observation.instruction)) + config.num_patches
        length = parts.statistics[self.policy.find_key(frame.statistics_key)].action_dim
        # A trace without passes is another engine's: plain decoding, one token per pass.
        nodes, kept = [1] * length, [1] * length
        if trace is not None and trace.passes:
            nodes = [len(one.tokens) for one in trace.passes]
            kept = [one.committed_length for one in trace.passes]
        head_rows = len(parts.target.vocabulary)
        first = PassTokens(0, prompt + nodes[0] - 1, nodes[0], head_rows, is_causal=True)
        costs = [decoder_cost(config.llm, num_rows, first, self.weights)]
        before = prompt + kept[0] - 1
        for num_nodes, committed in zip(nodes[1:], kept[1:], strict=True):
            tokens = PassTokens(before, num_nodes, num_nodes, head_rows)
            costs.append(decoder_cost(config.llm, num_rows, tokens, self.weights))
            before += committed
        return costs

    def _limit(self, costs: Sequence[Cost]) -> StageLimit:
        rates = self.rates
        floor = sum(cost.floor_ms(rates.bytes_per_s, rates.flops_per_s) for cost in costs)
        return StageLimit(sum(costs, _NOTHING), floor)


def _mean(limits: Sequence[StageLimit]) -> StageLimit:
    return StageLimit(
        Cost(
            float(np.mean([limit.cost.num_bytes for limit in limits])),
            float(np.mean([limit.cost.num_flops for limit in limits])),
        ),
        float(np.mean([limit.floor_ms for limit in limits])),
    )
