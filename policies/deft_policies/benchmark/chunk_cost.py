"""Limits of OFT's one pass on this device: what it must read and compute, over measured rates."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from deft_policies.benchmark.replay import Replay, ReplayFrame
from deft_policies.benchmark.roofline import (
    Cost,
    DeviceRates,
    PassTokens,
    Roofline,
    WeightBytes,
    decoder_cost,
    mean_limit,
    stage_limit,
    vision_cost,
)
from deft_policies.families.oft.chunk_model import ChunkModel
from deft_policies.families.oft.family import Oft
from deft_policies.families.policy import VlaPolicy


@dataclass(frozen=True, eq=False)
class ChunkCostModel:
    """What the towers and the pass of one policy cost."""

    policy: VlaPolicy
    rates: DeviceRates

    def roofline(self, run: Replay, frames: Sequence[ReplayFrame]) -> Roofline:
        """The limits of what a run did: each frame takes one pass, whatever its instruction."""
        rows = run.contender.batch_size
        passes = [stage_limit([self.pass_cost(frame, rows)], self.rates) for frame in frames]
        vision = stage_limit([self.vision_cost(rows)], self.rates)
        return Roofline({"vision": vision, "prefill": mean_limit(passes)})

    def vision_cost(self, num_rows: int) -> Cost:
        """Towers and projector over every picture, and what turns an instruction into scales."""
        model, weights = self._chunk, self._weights
        pictures = num_rows * model.shape.num_pictures
        seen = vision_cost(model.model.config, pictures, weights)
        return seen + module_cost(model.parts.film, num_rows, weights)

    def pass_cost(self, frame: ReplayFrame, num_rows: int) -> Cost:
        """The decoder over pictures, state, prompt, chunk and stop; then the head."""
        model, weights = self._chunk, self._weights
        prompt = len(self.policy.model.encode(frame.observation.instruction))
        shape, parts = model.shape, model.parts
        has_head = parts.head is not None
        tokens = PassTokens(
            before=0,
            new=model.num_before + prompt + shape.num_values + 1,
            scored=0 if has_head else shape.num_values,
            head_rows=0 if has_head else model.model.config.llm.vocabulary,
        )
        state = module_cost(parts.state, num_rows, weights)
        head = module_cost(parts.head, num_rows * shape.num_steps, weights)
        return decoder_cost(model.model.config.llm, num_rows, tokens, weights) + state + head

    @property
    def _weights(self) -> WeightBytes:
        return WeightBytes.of(self.policy)

    @property
    def _chunk(self) -> ChunkModel:
        assert isinstance(self.policy.model, Oft)
        return self.policy.model.chunk


def module_cost(module: nn.Module | None, num_inputs: int, weights: WeightBytes) -> Cost:
    """Each weight is read once, and multiplied once with each input."""
    numbers = sum(weight.numel() for weight in module.parameters()) if module is not None else 0
    return Cost(numbers * weights.other, 2.0 * numbers * num_inputs)
