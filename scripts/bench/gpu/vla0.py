"""VLA-0's shapes: Qwen2.5-VL-3B with random weights, as it is served and without fused kernels."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from deft_policies.decoding.captured import Shape
from deft_policies.decoding.target import Target
from deft_policies.families.vla0.network import Vla0Config, Vla0Network
from deft_policies.model.graphs import Reserve, Tensors
from deft_policies.model.qwen_vision import FRAMES, PATCH, QwenVisionSizes
from deft_policies.model.random_weights import STATISTICS_KEY, unit_statistics
from deft_policies.model.sizes import LlamaSizes, TokenRange
from deft_policies.model.vla import allocate
from scripts.bench.gpu.asking import Row
from scripts.bench.gpu.passes import name_of, passes_by_shape, profile
from scripts.bench.gpu.setting import MeasuredRunner, Setting

WIDTHS = (1, 16, 128)
_ROOM = 1024  # positions behind a prompt: its longest text
_PICTURES = 2
_NUM_TOKENS = 12  # that answers are written with


def qwen(size: str) -> Vla0Config:
    """Sizes as the published files have them, or as small as can be."""
    if size == "7b":
        llm = LlamaSizes(
            _NUM_TOKENS, 2048, 11008, 36, 16, 2, 128, max_positions=4096, has_qkv_bias=True
        )
        vision = QwenVisionSizes(1280, 3420, 32, 16, 2048, 112, frozenset((7, 15, 23, 31)))
        return _config(llm, vision, 151936, (16, 24, 24))
    llm = LlamaSizes(_NUM_TOKENS, 32, 48, 2, 4, 2, 8, max_positions=2048, has_qkv_bias=True)
    return _config(llm, QwenVisionSizes(32, 48, 2, 2, 32, 112, frozenset((1,))), 64, (2, 1, 1))


def _config(
    llm: LlamaSizes, vision: QwenVisionSizes, vocab_size: int, sections: tuple[int, ...]
) -> Vla0Config:
    statistics = {STATISTICS_KEY: unit_statistics()}
    ids = tuple(range(_NUM_TOKENS))
    return Vla0Config(llm, vision, vocab_size, sections, True, ids, statistics)


@torch.inference_mode()
def vla0(setting: Setting) -> Iterator[Row]:
    """A prefill, passes by width and the tower, all captured."""
    config = qwen(setting.size.name)
    with torch.device("meta"):
        network = Vla0Network(config).to(setting.dtype)
    allocate(network, setting.device)
    for name, parameter in network.named_parameters():
        if "norm" in name or "ln_q" in name:
            parameter.detach().fill_(1.0)
        else:
            parameter.detach().normal_(std=parameter.shape[-1] ** -0.5)
    network.requires_grad_(False).eval()
    fused = setting.network.decoder.kernels
    for kernels in (None, fused) if fused is not None else (None,):
        if kernels is not None:
            network.fuse(kernels)
        way = "without fused kernels" if kernels is None else "as it is served"
        length = setting.size.prompt
        runner = MeasuredRunner(setting, Reserve(1, length, length))
        target = Target(network.decoder, TokenRange(0, _NUM_TOKENS - 1), runner=runner)
        run = passes_by_shape(target, WIDTHS[-1], _ROOM, length)
        for shape in (Shape(1, 1, length), *(Shape(1, width) for width in WIDTHS)):
            run(shape)
            yield _row(setting, name_of(shape), way, runner)
        yield {"what": "products", "way": way, "bits": target.describe_equality()}
        side = 16  # patches of a picture's side
        patches = setting.random(_PICTURES, side**2, 3 * FRAMES * PATCH**2)
        runner.run("tower", partial(_see, network, (side, side)), (patches,))
        counts = profile(setting, "tower of vla0", runner.captures[-1].step.replay).counts
        row = _row(setting, f"tower, {_PICTURES} pictures", way, runner)
        yield {**row, "launches": counts.total()}


def _see(network: Vla0Network, grid: tuple[int, int], patches: Tensor) -> Tensors:
    return (network.vision(patches, grid),)


def _row(setting: Setting, what: str, way: str, runner: MeasuredRunner) -> Row:
    step = runner.captures[-1].step
    return {"what": what, "way": way, "ms": setting.median_ms(step.replay)}
