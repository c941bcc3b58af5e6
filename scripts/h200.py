"""One NVIDIA H200 as it is counted with here: assumed, nothing was measured on one.

A pass of OpenVLA-7B takes at least what it must read or compute over these rates.
"""

from functools import lru_cache

from deft_policies.benchmark.roofline import (
    Cost,
    DeviceRates,
    PassTokens,
    WeightBytes,
    decoder_cost,
    vision_cost,
)
from deft_policies.model.random_weights import NAMED_SIZES
from deft_policies.model.sizes import OpenVLAConfig

H200 = DeviceRates(bytes_per_s=4.3e12, flops_per_s=790e12, description="H200")
FP8_FLOPS_PER_S = 1580e12
PROMPT_TOKENS = 280  # image patches and an instruction
ACTION_LENGTH = 7
BFLOAT16, FP8 = WeightBytes(2.0, 2.0), WeightBytes(1.0, 2.0)


@lru_cache(maxsize=1)
def openvla() -> OpenVLAConfig:
    """The sizes of OpenVLA-7B."""
    return NAMED_SIZES["openvla-7b"]()


def limit_ms(cost: Cost) -> float:
    """The least that work in bfloat16 takes there."""
    return cost.floor_ms(H200.bytes_per_s, H200.flops_per_s)


@lru_cache(maxsize=1 << 14)  # few patterns come again and again
def action_ms(guesses: tuple[int, ...], accepted: tuple[int, ...], head_levels: int) -> float:
    """Milliseconds of one action whose passes had these guesses and kept these drafts.

    Before each later pass with guesses, a draft head runs once per level, `head_levels` at most,
    as deep as is of use; 0 where no head drafts.
    """
    config, before = openvla(), 0
    total = limit_ms(vision_cost(config, 1, BFLOAT16))
    for number, (nodes, kept) in enumerate(zip(guesses, accepted, strict=True)):
        new = nodes + (1 if number else PROMPT_TOKENS)
        tokens = PassTokens(before, new, nodes + 1, config.llm.vocabulary, is_causal=number == 0)
        total += limit_ms(decoder_cost(config.llm, 1, tokens, BFLOAT16))
        if number and nodes:
            missing = ACTION_LENGTH - 1 - (before - PROMPT_TOKENS + 1)
            total += min(head_levels, max(1, missing)) * _level_ms()
        before += kept + (1 if number else PROMPT_TOKENS)
    return total


@lru_cache(maxsize=1)
def _level_ms() -> float:
    """One level of a head: a layer, the matrix that joins its inputs, and the action rows."""
    config = openvla()
    width, rows = config.llm.width, len(config.vocabulary.tokens)
    weights = width * (4 * width + 3 * config.llm.mlp_width + 2 * width + rows)
    return limit_ms(Cost(2.0 * weights, 2.0 * weights))
