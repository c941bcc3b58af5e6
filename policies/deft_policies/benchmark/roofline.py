"""Limits of a replay on this device: what its passes must read and compute, over measured rates."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.benchmark import Timer

from deft_core.types import DecodeTrace
from deft_policies.benchmark.replay import Contender, Replay, ReplayFrame
from deft_policies.families.model import Model
from deft_policies.families.model_policy import ModelPolicy
from deft_policies.families.oft.model import Oft
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.formats import Quantization
from deft_policies.model.sizes import LlamaSizes, OpenVLAConfig, TowerConfig

_ROUNDS = 5
_PATIENCE_S = 2.0  # a format that a processor cannot multiply takes seconds a round


@dataclass(frozen=True)
class DeviceRates:
    """Best of a few rounds; bytes count both what a copy reads and what it writes."""

    bytes_per_s: float
    flops_per_s: float
    description: str


def measure_rates(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """Measure copy bandwidth and the rate of a large matrix product in this number format."""
    num_bytes, side = 1 << 27, 1024
    description = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        num_bytes, side = 1 << 31, 8192
        description = torch.cuda.get_device_name(device)
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copied_s = best_s(lambda: target.copy_(source))
    first = torch.ones(side, side, device=device, dtype=dtype)
    second = torch.ones_like(first)
    multiplied_s = best_s(lambda: first @ second)
    return DeviceRates(2 * num_bytes / copied_s, 2 * side**3 / multiplied_s, description)


def best_s(work: Callable[[], object]) -> float:
    """The time of some work, the best of a few rounds; of fewer where a round takes long."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    started, seconds = time.perf_counter(), [timer.timeit(1).mean]
    while len(seconds) < _ROUNDS and time.perf_counter() - started < _PATIENCE_S:
        seconds.append(timer.timeit(1).mean)
    return min(seconds)


@dataclass(frozen=True)
class Cost:
    """Bytes that must be read and floating-point operations that must be done."""

    num_bytes: float
    num_flops: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)

    def floor_ms(self, rates: DeviceRates) -> float:
        """The time below which nothing can go on a device of these rates."""
        return 1e3 * max(self.num_bytes / rates.bytes_per_s, self.num_flops / rates.flops_per_s)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes per weight: of the decoder's matrices, and of everything else."""

    decoder: float
    other: float

    @staticmethod
    def of(policy: ModelPolicy) -> "WeightBytes":
        """As the policy's weights lie in memory."""
        network = policy.model.network
        weight, quantization = network.decoder.embedding.weight, network.quantization
        size = float(weight.dtype.itemsize)
        if quantization is Quantization.NONE:
            return WeightBytes(size, size)
        # On a CPU int4 values are kept in a byte each.
        is_packed = quantization is Quantization.INT4 and weight.device.type == "cuda"
        return WeightBytes(0.5 if is_packed else 1.0, size)


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
    llm: LlamaSizes,
    num_rows: int,
    weights: WeightBytes,
    before: int,
    new: int,
    scored: int,
    head_rows: int,
    is_causal: bool = False,
) -> Cost:
    """One pass of the decoder: its matrices once, the cache of every row, the head's rows.

    Of each row, tokens in the cache `before`, `new` ones, and those that are `scored`.
    """
    queries, shared = llm.num_heads * llm.head_dim, llm.num_kv_heads * llm.head_dim
    per_layer = llm.width * (2 * queries + 2 * shared + 3 * llm.mlp_width)
    kept = 2 * shared  # keys and values of one token in one layer
    seen = before + new / 2 if is_causal else before + new
    attention = 4.0 * queries * new * seen
    head = head_rows * llm.width
    num_bytes = (
        llm.num_layers * per_layer * weights.decoder
        + head * weights.other
        + num_rows * llm.num_layers * kept * before * weights.other
    )
    flops = num_rows * (llm.num_layers * (2.0 * per_layer * new + attention) + 2.0 * head * scored)
    return Cost(num_bytes, flops)


def _tower_cost(tower: TowerConfig, num_rows: int, weight_bytes: float) -> Cost:
    num_tokens = tower.num_patches + tower.num_leading
    per_block = tower.width * (4 * tower.width + 2 * tower.mlp)
    patch = 3 * tower.patch_size**2 * tower.width
    attention = 4.0 * tower.width * num_tokens**2
    flops = tower.num_used_blocks * (2.0 * per_block * num_tokens + attention)
    flops += 2.0 * patch * tower.num_patches
    num_weights = tower.num_used_blocks * per_block + patch
    return Cost(num_weights * weight_bytes, num_rows * flops)


def module_cost(module: nn.Module | None, num_inputs: int, weights: WeightBytes) -> Cost:
    """Each weight is read once, and multiplied once with each input."""
    numbers = sum(weight.numel() for weight in module.parameters()) if module is not None else 0
    return Cost(numbers * weights.other, 2.0 * numbers * num_inputs)


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


def _limit(actions: Sequence[Sequence[Cost]], rates: DeviceRates) -> StageLimit:
    """From what the passes of each action cost, which follow each other."""
    passes = [cost for costs in actions for cost in costs]
    floor_ms = sum(cost.floor_ms(rates) for cost in passes)
    total = sum(passes, Cost(0.0, 0.0))
    cost = Cost(total.num_bytes / len(actions), total.num_flops / len(actions))
    return StageLimit(cost, floor_ms / len(actions))


def find_limits(
    policy: ModelPolicy, run: Replay, frames: Sequence[ReplayFrame], rates: DeviceRates
) -> Roofline:
    """The limits of what a run did, pass by pass."""
    passes = [
        pass_costs(policy, frame, answer.chunk.trace, run.contender)
        for frame, answer in zip(frames, run.answers, strict=True)
    ]
    vision = pictures_cost(policy, run.contender.batch_size)
    stages = {
        "vision": _limit([[vision]], rates),
        "prefill": _limit([cost[:1] for cost in passes], rates),
    }
    if any(len(cost) > 1 for cost in passes):
        stages["decode"] = _limit([cost[1:] for cost in passes], rates)
    return Roofline(stages)


def pictures_cost(policy: ModelPolicy, num_rows: int) -> Cost:
    """Towers and projector over every picture, and what turns an instruction into scales."""
    model, weights = policy.model, WeightBytes.of(policy)
    film = model.parts.film if isinstance(model, Oft) else None
    seen = vision_cost(_config_of(model), num_rows * model.num_pictures, weights)
    return seen + module_cost(film, num_rows, weights)


def has_limits(policy: ModelPolicy) -> bool:
    """Whether it is known what a frame needs at least."""
    return isinstance(policy.model.network.config, OpenVLAConfig)


def _config_of(model: Model) -> OpenVLAConfig:
    config = model.network.config
    assert isinstance(config, OpenVLAConfig)  # as `has_limits` says
    return config


def pass_costs(
    policy: ModelPolicy, frame: ReplayFrame, trace: DecodeTrace | None, contender: Contender
) -> list[Cost]:
    """What each pass of one answer costs."""
    num_rows, weights = contender.batch_size, WeightBytes.of(policy)
    instruction = frame.observation.instruction
    if isinstance(policy.model, Oft):
        num_ids = len(policy.model.encode(instruction))
        return [_chunk_cost(policy.model, num_ids, num_rows, weights)]
    assert isinstance(policy, VlaPolicy)
    model = policy.model_for(contender.options(frame))
    num_ids = len(model.encode(instruction))
    config = _config_of(model)
    prompt = num_ids + config.num_patches
    length = model.specs[policy.find_key(frame.statistics_key)].max_tokens
    if trace is not None:
        length = len(trace.tokens)
    # A trace without passes is another engine's: plain decoding, one token per pass.
    nodes, kept = [1] * length, [1] * length
    if trace is not None and trace.passes:
        nodes = [len(trace_of_pass.tokens) for trace_of_pass in trace.passes]
        kept = [trace_of_pass.committed_length for trace_of_pass in trace.passes]
    head_rows, num_cached, costs = model.target.num_tokens, 0, []
    for num_nodes, committed in zip(nodes, kept, strict=True):
        behind = 0 if num_cached else prompt - 1
        new = behind + num_nodes
        cost = decoder_cost(
            config.llm,
            num_rows,
            weights,
            num_cached,
            new,
            num_nodes,
            head_rows,
            is_causal=not num_cached,
        )
        costs.append(cost)
        num_cached += behind + committed
    return costs


def _chunk_cost(model: Oft, num_ids: int, num_rows: int, weights: WeightBytes) -> Cost:
    """The decoder over pictures, state, prompt, chunk and stop; then the head."""
    parts, llm = model.parts, model.network.config.llm
    scored, head_rows = (0, 0) if parts.head else (parts.num_values, llm.vocabulary)
    new = num_ids + model.num_others
    decoder = decoder_cost(llm, num_rows, weights, 0, new, scored, head_rows)
    state = module_cost(parts.state, num_rows, weights)
    return decoder + state + module_cost(parts.head, num_rows * parts.num_steps, weights)
