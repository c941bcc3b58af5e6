"""The decoder's matrices in fewer bits, and multiplied in another way: times and bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import torch

from deft_policies.benchmark.replay import Contender, replay
from deft_policies.decoding.captured import NARROW, Shape
from deft_policies.model.formats import Quantization
from deft_policies.model.graphs import Reserve
from scripts.bench.gpu import products
from scripts.bench.gpu.asking import Row
from scripts.bench.gpu.frames import captured_policy, scripts_like, times_of
from scripts.bench.gpu.passes import both_ways, capture_units, cases_of, verdict
from scripts.bench.gpu.setting import Setting
from scripts.bit_equality import find_difference

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import Tiles

_WIDTHS = (1, NARROW, 64)
_AS_SERVED, _WEIGHT_FIRST = "as it is served", "weight first"


@torch.inference_mode()
def weight_first(setting: Setting) -> Iterator[Row]:
    """In bfloat16, what products and passes take where the weight is the first operand."""
    kernels = setting.network.decoder.kernels
    if kernels is None:
        yield {"what": "no fused kernels here"}
        return
    # Imported here: it needs Triton.
    from deft_policies.model.kernels.launch import WEIGHT_FIRST

    few, *others = WEIGHT_FIRST
    rows: tuple[int, ...] = (1, NARROW, few.rows, 64)
    for inner, num_stages in ((128, 4), (128, 6), (256, 3), (256, 4)):
        tiles = replace(few, inner=inner, num_stages=num_stages), *others
        way = f"{_WEIGHT_FIRST}, {inner} at a time, {num_stages} stages"
        with _tiles(setting, tiles):
            for shape in products.decoder_shapes(setting.network.decoder):
                for found in products.table(setting, shape, rows):
                    yield {"what": found.pop("product"), "way": way, **found}
        rows = rows[:1]  # the others are cut as before
    with _tiles(setting, WEIGHT_FIRST):
        yield from _passes(setting, _WEIGHT_FIRST)


def fp8(setting: Setting) -> Iterator[Row]:
    """As it is served, and with the weight first."""
    yield from _in_few_bits(setting, Quantization.FP8)


def int4(setting: Setting) -> Iterator[Row]:
    """As it is served: there the weight is always first."""
    yield from _in_few_bits(setting, Quantization.INT4)


@torch.inference_mode()
def _in_few_bits(setting: Setting, quantization: Quantization) -> Iterator[Row]:
    """With the model's matrices in fewer bits; what asks next makes a new one."""
    network = setting.network
    for index in range(len(network.decoder.layers)):
        network.quantize_layer(index, quantization, setting.device)
    try:
        tensors = [*network.decoder.parameters(), *network.decoder.buffers()]
        num_bytes = sum(one.numel() * one.itemsize for one in tensors)
        yield {"what": "weights of the decoder", "GB": num_bytes / 1e9}
        yield from _passes(setting, _AS_SERVED)
        if network.decoder.kernels is not None and quantization is Quantization.FP8:
            from deft_policies.model.kernels.launch import WEIGHT_FIRST

            with _tiles(setting, WEIGHT_FIRST):
                yield from _passes(setting, _WEIGHT_FIRST)
    finally:
        del setting.network


@contextmanager
def _tiles(setting: Setting, tiles: "tuple[Tiles, ...]") -> Iterator[None]:
    """A block in which the model's products are cut like this."""
    network = setting.network
    before = network.decoder.kernels
    assert before is not None
    network.fuse(replace(before, tiles=tiles, _equals_ours={}))
    try:
        yield
    finally:
        network.fuse(before)


def _passes(setting: Setting, way: str) -> Iterator[Row]:
    """What passes and frames take, and whether drafts have plain decoding's bits."""
    length = setting.size.prompt
    shapes = [Shape(1, 1, length), *(Shape(1, width) for width in _WIDTHS)]
    for unit in capture_units(setting, Reserve(1, length, length), shapes):
        ms = median(setting.milliseconds(unit.step.replay))
        yield {"what": unit.name, "way": way, "ms": ms}
    eager, captured = both_ways(setting)
    for case in cases_of(eager.target, setting.size):
        found = verdict(case.name, "captured", find_difference(case, captured, eager))
        yield {"what": f"bits of {found['what']}", "way": way, "equal": found["equal"]}
    seen = setting.frames(setting.size.frames)
    scripts = scripts_like(["lossless", "deft"])
    policy, _ = captured_policy(setting, scripts, seen)
    contenders = [Contender(one.name, policy, one.name) for one in scripts]
    for run in replay(contenders, seen, num_warm_ups=2):
        times = times_of(run)
        yield {"what": f"frames, {run.contender.name}", "way": way, "ms": times["p50 ms"]}
