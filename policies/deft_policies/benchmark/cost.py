"""What a pass has to read and compute at least, from the model's sizes: the physical limits."""

from dataclasses import dataclass

from deft_policies.model.sizes import LlamaConfig, OpenVLAConfig, TowerConfig


@dataclass(frozen=True)
class Cost:
    """Bytes that must be read and floating-point operations that must be done."""

    num_bytes: float
    num_flops: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)

    def floor_ms(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The time below which nothing can go on a device of these rates."""
        return 1e3 * max(self.num_bytes / bytes_per_s, self.num_flops / flops_per_s)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes per weight: of the decoder's matrices, and of everything else."""

    decoder: float
    other: float


def vision_cost(config: OpenVLAConfig, num_rows: int, weights: WeightBytes) -> Cost:
    """Towers and projector; the weights are read once per batch."""
    total = Cost(0.0, 0.0)
    for tower in config.towers:
        total += _tower_cost(tower, num_rows, weights.other)
    vision, width = config.vision_width, config.llm.width
    sizes = [(vision, 4 * vision), (4 * vision, width), (width, width)]
    if len(config.towers) == 1:
        sizes = [(vision, width), (width, width)]
    num_weights = sum(first * second for first, second in sizes)
    flops = 2.0 * num_weights * config.num_patches * num_rows
    return total + Cost(num_weights * weights.other, flops)


def decoder_cost(
    llm: LlamaConfig, num_rows: int, tokens: "PassTokens", weights: WeightBytes
) -> Cost:
    """One pass of the decoder: its matrices once, the cache of every row, the head's rows."""
    per_layer = _layer_weights(llm)
    kept = 2 * llm.kv_heads * llm.head_width  # keys and values of one token in one layer
    seen = tokens.before + tokens.new / 2 if tokens.is_causal else tokens.before + tokens.new
    attention = 4.0 * llm.heads * llm.head_width * tokens.new * seen
    head = tokens.head_rows * llm.width
    num_bytes = (
        llm.num_layers * per_layer * weights.decoder
        + head * weights.other
        + num_rows * llm.num_layers * kept * tokens.before * weights.other
    )
    flops = num_rows * (
        llm.num_layers * (2.0 * per_layer * tokens.new + attention) + 2.0 * head * tokens.scored
    )
    return Cost(num_bytes, flops)


@dataclass(frozen=True)
class PassTokens:
    """The shape of a pass: tokens in the cache before it, new ones, and those that are scored."""

    before: int
    new: int
    scored: int
    head_rows: int
    is_causal: bool = False


def _layer_weights(llm: LlamaConfig) -> int:
    queries, shared = llm.heads * llm.head_width, llm.kv_heads * llm.head_width
    return llm.width * (2 * queries + 2 * shared + 3 * llm.mlp)


def _tower_cost(tower: TowerConfig, num_rows: int, weight_bytes: float) -> Cost:
    num_tokens = tower.num_patches + tower.num_registers + int(tower.has_class_token)
    per_block = tower.width * (4 * tower.width + 2 * tower.mlp)
    patch = 3 * tower.patch_size**2 * tower.width
    attention = 4.0 * tower.width * num_tokens**2
    flops = tower.num_used_blocks * (2.0 * per_block * num_tokens + attention)
    flops += 2.0 * patch * tower.num_patches
    num_weights = tower.num_used_blocks * per_block + patch
    return Cost(num_weights * weight_bytes, num_rows * flops)
