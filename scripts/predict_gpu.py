"""OpenVLA-7B on one NVIDIA H200, by arithmetic; run as a module, it prints what goals come to.

A pass takes at least what it must read or compute over the device's rates (`roofline`), and every
launch a little more beside that. Launches are counted by tests; the rates and what a launch takes
are assumed, nothing was measured on one.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from deft_client.measures.table import markdown_table
from deft_policies.benchmark.roofline import (
    Cost,
    DeviceRates,
    WeightBytes,
    decoder_cost,
    vision_cost,
)
from deft_policies.model.random_weights import NAMED_SIZES
from deft_policies.model.sizes import OpenVLAConfig
from scripts.reproduce.published import ACTION_LENGTH, RELAXED_GOAL

H200 = DeviceRates(bytes_per_s=4.3e12, flops_per_s=790e12, description="H200")
H200_FP8 = replace(H200, flops_per_s=1580e12)
PROMPT_TOKENS = 280  # image patches and an instruction
BFLOAT16, FP8 = WeightBytes(2.0, 2.0), WeightBytes(1.0, 2.0)

# Counted by tests/policies/model/test_fused_passes.py and test_fp8.py.
LAYER_LAUNCHES, FP8_LAYER_LAUNCHES, BLOCK_LAUNCHES = 10, 11, 8
# Assumed of one H200, beside its rates.
LAUNCH_MS = 0.0015  # inside of a graph: what is lost between two kernels, and their smallest time
ROUND_MS = 0.03  # between two graphs: the read, and the next launch
FRAME_MS = 0.3  # a frame's own operations that the device waits for
_HEAD_LEVELS, _HEAD_LAUNCHES = 5, 30


@lru_cache(maxsize=1)
def openvla() -> OpenVLAConfig:
    """The sizes of OpenVLA-7B."""
    return NAMED_SIZES["openvla-7b"]()


def limit_ms(cost: Cost) -> float:
    """The least that work in bfloat16 takes there."""
    return cost.floor_ms(H200)


@dataclass(frozen=True)
class HeadWork:
    """What a draft head does before a pass with guesses, as far as its cost depends on it."""

    levels: int = 0  # how often it runs; 0 where no head drafts
    is_full_depth: bool = False  # also where the end of the action is nearer
    whole_vocabulary: bool = False  # its logits are over every token, not over action tokens alone


@lru_cache(maxsize=1 << 14)  # few patterns come again and again
def action_ms(guesses: tuple[int, ...], accepted: tuple[int, ...], head: HeadWork) -> float:
    """Milliseconds of one action whose passes had these guesses and kept these drafts."""
    config, before = openvla(), 0
    total = limit_ms(vision_cost(config, 1, BFLOAT16))
    for number, (nodes, kept) in enumerate(zip(guesses, accepted, strict=True)):
        new = nodes + (1 if number else PROMPT_TOKENS)
        tokens = (before, new, nodes + 1, config.llm.vocabulary)
        cost = decoder_cost(config.llm, 1, BFLOAT16, *tokens, is_causal=number == 0)
        total += limit_ms(cost)
        if number and nodes:
            missing = ACTION_LENGTH - 1 - (before - PROMPT_TOKENS + 1)
            levels = head.levels if head.is_full_depth else min(head.levels, max(1, missing))
            total += levels * _level_ms(head.whole_vocabulary)
        before += kept + (1 if number else PROMPT_TOKENS)
    return total


@lru_cache(maxsize=2)
def _level_ms(whole_vocabulary: bool) -> float:
    """One level of a head: a layer, the matrix that joins its inputs, and its logits."""
    config = openvla()
    width = config.llm.width
    rows = config.llm.vocabulary if whole_vocabulary else len(config.action_tokens)
    weights = width * (4 * width + 3 * config.llm.mlp_width + 2 * width + rows)
    return limit_ms(Cost(2.0 * weights, 2.0 * weights))


@dataclass(frozen=True)
class Predicted:
    """One goal, in milliseconds."""

    what: str
    limit_ms: float
    predicted_ms: float
    goal_ms: float


class Arithmetic:
    """The stages of OpenVLA-7B at one row, in bfloat16 or with matrices in fp8."""

    def __init__(self, weights: WeightBytes) -> None:
        self._config = openvla()
        self._weights = weights
        self._is_fp8 = weights == FP8
        self._layer = FP8_LAYER_LAUNCHES if self._is_fp8 else LAYER_LAUNCHES

    def limit_ms(self, cost: Cost) -> float:
        """What a stage cannot go below."""
        return cost.floor_ms(H200_FP8 if self._is_fp8 else H200)

    def vision(self) -> tuple[float, float]:
        """Limit and prediction; the towers run side by side, so that the deeper one's count."""
        limit = limit_ms(vision_cost(self._config, 1, self._weights))
        deepest = max(tower.num_used_blocks for tower in self._config.towers)
        return limit, limit + deepest * BLOCK_LAUNCHES * LAUNCH_MS

    def decoder(self, before: int, nodes: int) -> tuple[float, float]:
        """Limit and prediction of one pass, the prefill if nothing is there before it."""
        llm = self._config.llm
        new = nodes if before else PROMPT_TOKENS + nodes - 1
        tokens = (before, new, nodes, llm.vocabulary)
        cost = decoder_cost(llm, 1, self._weights, *tokens, is_causal=not before)
        limit = self.limit_ms(cost)
        return limit, limit + llm.num_layers * self._layer * LAUNCH_MS

    def head(self) -> tuple[float, float]:
        """Limit and prediction of a tree: a pass over what was committed, and over all levels but
        the last, each with its logits over the whole vocabulary."""
        width, mlp = self._config.llm.width, self._config.llm.mlp_width
        own = 2 * width * (6 * width + 3 * mlp)
        vocabulary = 2 * width * self._config.llm.vocabulary
        limit = 1e3 * _HEAD_LEVELS * (own + vocabulary) / H200.bytes_per_s
        return limit, limit + _HEAD_LEVELS * _HEAD_LAUNCHES * LAUNCH_MS

    def action(
        self, num_rounds: float, nodes: int, riders: int = 0, has_head: bool = False
    ) -> tuple[float, float]:
        """Limit and prediction of a whole action; its limit leaves the head's drafting out."""
        stages = [self.vision(), self.decoder(0, 1 + riders)]
        limit, predicted = (sum(stage[part] for stage in stages) for part in (0, 1))
        one = self.decoder(PROMPT_TOKENS, nodes)
        drafting = self.head()[1] if has_head else 0.0
        limit += num_rounds * one[0]
        return limit, predicted + num_rounds * (one[1] + drafting + ROUND_MS) + FRAME_MS


def predictions() -> Iterator[Predicted]:
    """Every goal of `scripts.bench gpu` at one row."""
    plain, fp8 = Arithmetic(BFLOAT16), Arithmetic(FP8)
    committed = sum(length * share for length, share in enumerate(RELAXED_GOAL)) + 1
    # Of 6 guesses behind the prompt a fifth is wrong, and each of those takes a round.
    rest = ACTION_LENGTH - 1
    wrong = 0.2 * rest
    yield Predicted("autoregressive", *plain.action(rest, 1), 30.0)
    yield Predicted("one decode pass", *plain.decoder(PROMPT_TOKENS, 1), 3.7)
    yield Predicted("one 50-node pass", *plain.decoder(PROMPT_TOKENS, 50), 3.7)
    # One token comes with the prefill; the published loop goes on to an eighth.
    spec_vla = plain.action(ACTION_LENGTH / committed, 50, has_head=True)
    yield Predicted("Spec-VLA relaxed", *spec_vla, 17.0)
    yield Predicted("prefill p = 0.8", *plain.action(wrong, ACTION_LENGTH, rest), 11.5)
    yield Predicted("prefill p = 1", *plain.action(0, 1, rest), 7.5)
    yield Predicted("autoregressive fp8", *fp8.action(rest, 1), 17.0)
    yield Predicted("prefill p = 0.8 fp8", *fp8.action(wrong, ACTION_LENGTH, rest), 7.5)


def main() -> int:
    """Print the goals with their limits and what the arithmetic says."""
    rows = [
        [one.what, f"{one.limit_ms:.2f}", f"{one.predicted_ms:.2f}", f"{one.goal_ms:.1f}"]
        for one in predictions()
    ]
    sys.stdout.write(markdown_table(["ms", "limit", "predicted", "goal"], rows, aligned=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
