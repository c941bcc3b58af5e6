"""What the passes of an action would take with OpenVLA-7B on an H200, by arithmetic alone.

The limits of `roofline` over the rates measured there: nothing can be faster, and nothing was run.
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
PROMPT_TOKENS = 280  # image patches and an instruction
ACTION_LENGTH = 7
_BFLOAT16 = WeightBytes(2.0, 2.0)


@lru_cache(maxsize=1)
def _config() -> OpenVLAConfig:
    return NAMED_SIZES["openvla-7b"]()


@lru_cache(maxsize=1 << 14)  # few patterns come again and again
def action_ms(guesses: tuple[int, ...], accepted: tuple[int, ...], head_levels: int) -> float:
    """Milliseconds of one action whose passes had these guesses and kept these drafts.

    Before each later pass with guesses, a draft head runs once per level, `head_levels` at most,
    as deep as is of use; 0 where no head drafts.
    """
    config, before = _config(), 0
    total = _ms(vision_cost(config, 1, _BFLOAT16))
    for number, (nodes, kept) in enumerate(zip(guesses, accepted, strict=True)):
        new = nodes + (1 if number else PROMPT_TOKENS)
        rows = config.llm.vocab_size
        tokens = PassTokens(before, new, nodes + 1, rows, is_causal=number == 0)
        total += _ms(decoder_cost(config.llm, 1, tokens, _BFLOAT16))
        if number and nodes:
            missing = ACTION_LENGTH - 1 - (before - PROMPT_TOKENS + 1)
            total += min(head_levels, max(1, missing)) * _level_ms()
        before += kept + (1 if number else PROMPT_TOKENS)
    return total


@lru_cache(maxsize=1)
def _level_ms() -> float:
    """One level of a head: a layer, the matrix that joins its inputs, and the action rows."""
    config = _config()
    width, rows = config.llm.width, len(config.vocabulary.tokens)
    weights = width * (4 * width + 3 * config.llm.mlp + 2 * width + rows)
    return _ms(Cost(2.0 * weights, 2.0 * weights))


def _ms(cost: Cost) -> float:
    return cost.floor_ms(H200.bytes_per_s, H200.flops_per_s)
