"""What the goals on a GPU would come to, by arithmetic; run as a module, it prints the table.

A pass takes as long as what it must read or compute (`roofline`), and every launch a little more
beside that. Launches are counted by tests; the rates and what a launch takes are assumed.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from deft_client.commands.table import markdown_table
from deft_policies.benchmark.roofline import (
    Cost,
    PassTokens,
    WeightBytes,
    decoder_cost,
    vision_cost,
)
from scripts.h200 import (
    ACTION_LENGTH,
    BFLOAT16,
    FP8,
    FP8_FLOPS_PER_S,
    H200,
    PROMPT_TOKENS,
    limit_ms,
    openvla,
)
from scripts.reproduce.published import RELAXED_GOAL

# Counted by tests/policies/model/test_fused_passes.py and test_fp8.py.
LAYER_LAUNCHES, FP8_LAYER_LAUNCHES, BLOCK_LAUNCHES = 10, 11, 8
# Assumed of one H200, beside its rates.
LAUNCH_MS = 0.0015  # inside of a graph: what is lost between two kernels, and their smallest time
ROUND_MS = 0.03  # between two graphs: the read, and the next launch
FRAME_MS = 0.3  # a frame's own operations that the device waits for
_HEAD_LEVELS, _HEAD_LAUNCHES = 5, 30


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
        rate = FP8_FLOPS_PER_S if self._is_fp8 else H200.flops_per_s
        return cost.floor_ms(H200.bytes_per_s, rate)

    def vision(self) -> tuple[float, float]:
        """Limit and prediction; the towers run side by side, so that the deeper one's count."""
        limit = limit_ms(vision_cost(self._config, 1, self._weights))
        deepest = max(tower.num_used_blocks for tower in self._config.towers)
        return limit, limit + deepest * BLOCK_LAUNCHES * LAUNCH_MS

    def decoder(self, before: int, nodes: int) -> tuple[float, float]:
        """Limit and prediction of one pass, the prefill if nothing is there before it."""
        llm = self._config.llm
        new = nodes if before else PROMPT_TOKENS + nodes - 1
        tokens = PassTokens(before, new, nodes, llm.vocabulary, is_causal=not before)
        limit = self.limit_ms(decoder_cost(llm, 1, tokens, self._weights))
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
    """Every goal of `bench_gpu` at one row."""
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
