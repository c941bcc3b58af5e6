"""The decoder's matrices in fp8: what passes and frames take, and their bits."""

from collections.abc import Iterator
from statistics import median

import torch

from deft_policies.benchmark.replay import Contender, replay
from deft_policies.decoding.captured import NARROW, Shape
from deft_policies.model.formats import Quantization
from deft_policies.model.graphs import Reserve
from scripts.bench.gpu.asking import Row
from scripts.bench.gpu.frames import captured_policy, scripts_like, times_of
from scripts.bench.gpu.passes import both_ways, capture_units, cases_of, verdict
from scripts.bench.gpu.setting import Setting
from scripts.bit_equality import find_difference

_WIDTHS = (1, NARROW, 64)


@torch.inference_mode()
def fp8(setting: Setting) -> Iterator[Row]:
    """Comes last: the model's own matrices become fp8 for good."""
    network, length = setting.network, setting.size.prompt
    for index in range(len(network.decoder.layers)):
        network.quantize_layer(index, Quantization.FP8, setting.device)
    tensors = [*network.decoder.parameters(), *network.decoder.buffers()]
    num_bytes = sum(one.numel() * one.itemsize for one in tensors)
    yield {"what": "weights of the decoder", "GB": num_bytes / 1e9}
    shapes = [Shape(1, 1, length), *(Shape(1, width) for width in _WIDTHS)]
    for unit in capture_units(setting, Reserve(1, length, length), shapes):
        yield {"what": unit.name, "ms": median(setting.milliseconds(unit.step.replay))}
    eager, captured = both_ways(setting)
    for case in cases_of(eager.target, setting.size):
        found = verdict(case.name, "captured", find_difference(case, captured, eager))
        yield {"what": f"bits of {found['what']}", "equal": found["equal"]}
    seen = setting.frames(setting.size.frames)
    scripts = scripts_like(["lossless", "deft"])
    policy, _ = captured_policy(setting, scripts, seen)
    contenders = [Contender(one.name, policy, one.name) for one in scripts]
    for run in replay(contenders, seen, num_warm_ups=2):
        times = times_of(run)
        yield {"what": f"frames, {run.contender.name}", "ms": times["p50 ms"]}
