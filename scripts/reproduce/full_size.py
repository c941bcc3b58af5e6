"""What an action of OpenVLA-7B takes at least on one NVIDIA H200, by arithmetic.

A pass takes at least what it must read or compute, over rates that are assumed of the device.
`scripts.bench gpu` measures what it takes.
"""

from dataclasses import dataclass
from functools import lru_cache

from deft_policies.benchmark.roofline import (
    Cost,
    DeviceRates,
    WeightBytes,
    decoder_cost,
    vision_cost,
)
from deft_policies.model.random_weights import NAMED_SIZES
from deft_policies.model.sizes import OpenVLAConfig
from scripts.reproduce.published import ACTION_LENGTH

H200 = DeviceRates(bytes_per_s=4.3e12, flops_per_s=790e12, description="H200")
PROMPT_TOKENS = 280  # image patches and an instruction
BFLOAT16 = WeightBytes(2.0, 2.0)


@dataclass(frozen=True)
class HeadWork:
    """What a draft head does before a pass with guesses, as far as its cost depends on it."""

    levels: int = 0  # how often it runs; 0 where no head drafts
    is_full_depth: bool = False  # also where the end of the action is nearer
    whole_vocabulary: bool = False  # its logits are over every token, not over action tokens alone


@lru_cache(maxsize=1 << 14)  # few patterns come again and again
def action_ms(guesses: tuple[int, ...], accepted: tuple[int, ...], head: HeadWork) -> float:
    """Milliseconds of one action whose passes had these guesses and kept these drafts."""
    config, before = _openvla(), 0
    total = vision_cost(config, 1, BFLOAT16).floor_ms(H200)
    for number, (nodes, kept) in enumerate(zip(guesses, accepted, strict=True)):
        new = nodes + (1 if number else PROMPT_TOKENS)
        tokens = (before, new, nodes + 1, config.llm.vocabulary)
        cost = decoder_cost(config.llm, 1, BFLOAT16, *tokens, is_causal=number == 0)
        total += cost.floor_ms(H200)
        if number and nodes:
            missing = ACTION_LENGTH - 1 - (before - PROMPT_TOKENS + 1)
            levels = head.levels if head.is_full_depth else min(head.levels, max(1, missing))
            total += levels * _level_ms(head.whole_vocabulary)
        before += kept + (1 if number else PROMPT_TOKENS)
    return total


@lru_cache(maxsize=2)
def _level_ms(whole_vocabulary: bool) -> float:
    """One level of a head: a layer, the matrix that joins its inputs, and its logits."""
    config = _openvla()
    width = config.llm.width
    rows = config.llm.vocabulary if whole_vocabulary else len(config.action_tokens)
    weights = width * (4 * width + 3 * config.llm.mlp_width + 2 * width + rows)
    return Cost(2.0 * weights, 2.0 * weights).floor_ms(H200)


@lru_cache(maxsize=1)
def _openvla() -> OpenVLAConfig:
    return NAMED_SIZES["openvla-7b"]()
