"""What a server's start captures: all of it by counting, and as far as time allows by doing it."""

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deft_policies.families.family import LONGEST_INSTRUCTION
from deft_policies.families.openvla import VlaTarget
from deft_policies.model.graphs import (
    Capture,
    CapturedStep,
    Reserve,
    Step,
    StepRunner,
    Tensors,
)
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.sizes import OpenVLAConfig
from deft_policies.model.vla import OpenVLAModel
from scripts.bench.gpu.asking import Row
from scripts.bench.gpu.passes import num_bytes_of
from scripts.bench.gpu.setting import (
    SIZES,
    MeasuredRunner,
    OutOfTimeError,
    Setting,
    kind_of,
    repeat,
)

_WIDEST = 64  # nodes of a tree
_BEHIND = 8 + _WIDEST  # slots behind the longest prompt: an action, and a tree


@dataclass(frozen=True)
class Plan:
    """What a start captures."""

    graphs: dict[str, int]  # by kind
    num_bytes: int  # of inputs, outputs and the cache; nodes of graphs come on top


@torch.inference_mode()
def server(setting: Setting) -> Iterator[Row]:
    """Graphs, seconds and memory of `deft serve` with all that it is set to by default."""
    reserve = reserve_of(setting.config)
    plan = plan_start(setting.config, setting.dtype, reserve)
    total = sum(plan.graphs.values())
    yield {"what": "planned: all", "graphs": total, "GB": plan.num_bytes / 1e9}
    for kind, count in plan.graphs.items():
        yield {"what": f"planned: {kind}", "graphs": count}
    free = setting.free_bytes()
    if setting.is_cuda and free < plan.num_bytes:
        yield {"what": f"not done: {free / 1e9:.1f} GB are free"}
        return
    runner = MeasuredRunner(setting, reserve, setting.size.captures_s)
    policy = setting.new_policy(runner)
    try:
        with runner.warming_up():
            policy.model.capture()
            policy.capture(policy.info.decoding_methods)
    except OutOfTimeError:
        share = len(runner.captures) / total
        seconds = setting.size.captures_s / share if share else None
        yield {"what": "stopped; all would take about", "graphs": total, "seconds": seconds}
    for kind, captures in runner.kinds.items():
        yield {
            "what": f"done: {kind}",
            "graphs": len(captures),
            "seconds": sum(one.seconds for one in captures),
            "GB": sum(one.num_bytes for one in captures) / 1e9,
        }


def reserve_of(config: OpenVLAConfig) -> Reserve:
    """What a server of this model sets memory aside for: as `OpenVLAFamily.build_target`."""
    return Reserve(
        shortest=config.num_patches + 1, longest=config.num_patches + LONGEST_INSTRUCTION
    )


@torch.inference_mode()
def plan_start(config: OpenVLAConfig, dtype: torch.dtype, reserve: Reserve) -> Plan:
    """Count without computing: passes on tensors that hold nothing, rounds on a tiny model."""
    shallow = replace(config, llm=replace(config.llm, num_layers=1))
    model = OpenVLAModel.empty(shallow, torch.device("meta"), dtype)
    runner = _Counting(reserve)
    target = VlaTarget(model, runner=runner)
    cache = KVCache(config.llm, model.decoder.embedding.weight)
    cache.fix(reserve.batches[0], reserve.padded(reserve.longest) + _BEHIND)
    target.record(cache, _WIDEST)
    graphs = dict(Counter(map(kind_of, runner.captured)))
    graphs |= {"towers": len(reserve.batches), "rounds": _count_rounds(reserve)}
    kept = sum(map(num_bytes_of, runner.captured.values()))
    return Plan(graphs, kept + cache._data.nbytes)


def _count_rounds(reserve: Reserve) -> int:
    """Rounds depend on methods, not on the model; batches of every size have as many."""
    twin = Setting(SIZES["tiny"], torch.device("cpu"), Path())
    runner = _Counting(Reserve(1, 32, 32))
    policy = twin.new_policy(runner)
    with runner.warming_up():
        policy.capture(policy.info.decoding_methods)
    return Counter(map(kind_of, runner.captured))["rounds"] * len(reserve.batches)


class _Counting(StepRunner):
    """Keeps what would be captured, without running it more than once."""

    def __init__(self, reserve: Reserve) -> None:
        super().__init__(repeat, reserve)

    @property
    def captured(self) -> dict[Hashable, CapturedStep]:
        """Steps by their keys."""
        return self._captured

    def _capture_step(self, capture: Capture, step: Step, inputs: Tensors) -> CapturedStep:
        self._is_capturing = True
        try:
            return CapturedStep(inputs, step(*inputs), lambda: None)
        finally:
            self._is_capturing = False
