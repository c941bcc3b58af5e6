"""Matrices in fewer bits, and multiplied in other ways than they are served: times and bits."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deft_policies.benchmark.replay import Contender, replay
from deft_policies.decoding.captured import NARROW, Shape
from deft_policies.model.formats import Quantization
from deft_policies.model.graphs import Reserve, Tensors
from scripts.bench.gpu import products
from scripts.bench.gpu.asking import Row
from scripts.bench.gpu.frames import captured_policy, scripts_like, times_of
from scripts.bench.gpu.passes import both_ways, capture_units, cases_of, verdict
from scripts.bench.gpu.setting import MeasuredRunner, Setting
from scripts.bit_equality import find_difference

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import Tiles

_WIDTHS = (1, NARROW, 64)
_AS_SERVED, _WEIGHT_FIRST = "as it is served", "weight first"
_KEPT_WIDE = "weight first, wide copies kept"


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
        with _kernels(setting, tiles=tiles):
            for shape in products.decoder_shapes(setting.network.decoder):
                for found in products.table(setting, shape, rows):
                    yield {"what": found.pop("product"), "way": way, **found}
        rows = rows[:1]  # the others are cut as before
    with _kernels(setting, tiles=WEIGHT_FIRST):
        yield from _passes(setting, _WEIGHT_FIRST)


@torch.inference_mode()
def towers(setting: Setting) -> Iterator[Row]:
    """Towers and projector by other attentions, and by products of our own with GELU in them."""
    network, config = setting.network, setting.config
    side = config.image.size
    pixels = setting.random(2, 3 * len(config.towers), side, side)
    served = network.see(pixels)

    def see(one: Tensor) -> Tensors:
        return (network.see(one),)

    for way, block in _ways_to_look(setting):
        with block:
            runner = MeasuredRunner(setting, Reserve(1))
            (alone,) = runner.run(way, see, (pixels[:1],))
            both = network.see(pixels)
            yield {
                "way": way,
                "ms": setting.median_ms(runner.captures[-1].step.replay),
                "as it is served": products.compare_bits(both, served),
                "alone as with another": products.compare_bits(alone, both[:1]),
            }


def _ways_to_look(setting: Setting) -> Iterator[tuple[str, AbstractContextManager[object]]]:
    yield _AS_SERVED, nullcontext()
    attentions = {"flash attention": SDPBackend.FLASH_ATTENTION}
    if setting.is_cuda:
        attentions["cuDNN's attention"] = SDPBackend.CUDNN_ATTENTION
        attentions["memory-efficient attention"] = SDPBackend.EFFICIENT_ATTENTION
    for name, backend in attentions.items():
        yield f"{name} alone", sdpa_kernel(backend)
    if setting.network.decoder.kernels is None:
        return
    from deft_policies.model.kernels.launch import OF_TOWERS

    for rows, columns, inner, num_stages in ((64, 64, 64, 4), (64, 128, 64, 3), (64, 32, 128, 4)):
        tiles = replace(OF_TOWERS, rows=rows, columns=columns, inner=inner, num_stages=num_stages)
        way = f"our products, {rows}x{columns}x{inner}"
        yield way, _kernels(setting, of_towers=tiles)


def fp8(setting: Setting) -> Iterator[Row]:
    """As it is served, with the weight first, and with wide copies for prefills, too."""
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

            for way, keeps_wide in ((_WEIGHT_FIRST, False), (_KEPT_WIDE, True)):
                with _kernels(setting, tiles=WEIGHT_FIRST, keeps_wide=keeps_wide):
                    yield from _passes(setting, way)
    finally:
        del setting.network


@contextmanager
def _kernels(setting: Setting, **changes: "tuple[Tiles, ...] | Tiles | bool") -> Iterator[None]:
    """A block in which the model's kernels have these changes."""
    network = setting.network
    before = network.decoder.kernels
    assert before is not None
    network.fuse(replace(before, **changes, _equals_ours={}, _wide={}))  # type: ignore[arg-type]
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
