"""What a server's start captures, in which time and memory, beside what was planned."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deft_policies.decoding.captured import Layout, shapes_of
from deft_policies.decoding.planner import WIDEST
from deft_policies.decoding.warm_up import capture
from deft_policies.model.graphs import Reserve
from deft_policies.model.sizes import OpenVLAConfig
from scripts.bench.gpu.asking import Row
from scripts.bench.gpu.setting import MeasuredRunner, OutOfTimeError, Setting, reserve_of

_ACTION = 7  # tokens of an answer


@dataclass(frozen=True)
class Plan:
    """What a start captures."""

    graphs: dict[str, int]  # by kind
    num_bytes: dict[str, int]  # by what they are for

    @property
    def num_graphs(self) -> int:
        """Of all kinds."""
        return sum(self.graphs.values())

    @property
    def total_bytes(self) -> int:
        """Beside the weights."""
        return sum(self.num_bytes.values())


@torch.inference_mode()
def server(setting: Setting) -> Iterator[Row]:
    """Graphs, seconds and memory of `deft serve` with all that it is set to by default."""
    reserve = reserve_of(setting.config)
    plan = plan_start(setting.config, setting.dtype, reserve)
    yield {"what": "planned: all", "graphs": plan.num_graphs, "GB": plan.total_bytes / 1e9}
    for kind, count in plan.graphs.items():
        yield {"what": f"planned: {kind}", "graphs": count}
    for what, size in plan.num_bytes.items():
        yield {"what": f"planned: {what}", "GB": size / 1e9}
    free, started = setting.free_bytes(), time.monotonic()
    if setting.is_cuda and free < plan.total_bytes:
        yield {"what": f"not done: {free / 1e9:.1f} GB are free"}
        return
    runner = MeasuredRunner(setting, reserve, setting.size.captures_s)
    policy = setting.new_policy(runner)
    yield {"what": "done: set aside", "GB": (free - setting.free_bytes()) / 1e9}
    try:
        with runner.warming_up():
            policy.model.capture()
            capture(policy.engine)
    except OutOfTimeError:
        share = len(runner.captures) / plan.num_graphs
        seconds = setting.size.captures_s / share if share else None
        yield {"what": "stopped; all would take about", "seconds": seconds}
    for kind, captures in runner.kinds.items():
        yield {
            "what": f"done: {kind}",
            "graphs": len(captures),
            "seconds": sum(one.seconds for one in captures),
            "GB": sum(one.num_bytes for one in captures) / 1e9,
        }
    yield {
        "what": "done: all",
        "graphs": len(runner.captures),
        "seconds": time.monotonic() - started,
        "GB": (free - setting.free_bytes()) / 1e9,
    }


def plan_start(config: OpenVLAConfig, dtype: torch.dtype, reserve: Reserve) -> Plan:
    """Counted, without computing: as `OpenVLAFamily.planned_bytes`, and the towers' graphs."""
    shapes = shapes_of(reserve, WIDEST, keeps_hidden=False)
    kinds = Counter("prefills" if one.length else "passes" for one in shapes)
    layout = Layout(reserve, WIDEST, _ACTION + 1)
    num_bytes = layout.bytes_of(config.llm, dtype.itemsize, len(shapes))
    return Plan({**kinds, "towers": len(reserve.batches)}, num_bytes)
