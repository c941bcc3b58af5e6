"""pi0-FAST's shapes: PaliGemma-3B with random weights, as it is served and with fused kernels."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from deft_policies.decoding.captured import Shape
from deft_policies.decoding.target import Target
from deft_policies.families.pi0fast.network import TABLE, PaliGemma, Pi0FastConfig
from deft_policies.families.pi0fast.pictures import SIDE
from deft_policies.model.graphs import Reserve, Tensors
from deft_policies.model.sizes import LlamaSizes, TokenRange, TowerConfig
from deft_policies.model.vla import allocate
from scripts.bench.gpu.asking import Row
from scripts.bench.gpu.passes import name_of, passes_by_shape
from scripts.bench.gpu.setting import MeasuredRunner, Setting

WIDTHS = (1, 16, 64)
_CODES = 2048  # words that answers are written with
_ROOM = 256  # positions behind a prompt
_PICTURES = 2


def paligemma(size: str) -> tuple[Pi0FastConfig, int]:
    """Sizes as the published files have them, or as small as can be; positions of a prompt."""
    if size == "7b":
        llm = LlamaSizes(_CODES, 2048, 16384, 18, 8, 1, 256, gate="gelu_tanh")
        tower, length = TowerConfig(False, "", width=1152, depth=27, heads=16, mlp=4304), 768
    else:
        llm = LlamaSizes(32, 16, 24, 2, 4, 1, 8, gate="gelu_tanh")
        tower, length = TowerConfig(False, "", width=16, depth=2, heads=2, mlp=24), 32
    return Pi0FastConfig(llm, tower, llm.vocabulary, (TABLE,), (), {}), length


@torch.inference_mode()
def pi0fast(setting: Setting) -> Iterator[Row]:
    """A prefill of two pictures, passes by width and the tower, all captured."""
    config, length = paligemma(setting.size.name)
    with torch.device("meta"):
        network = PaliGemma(config).to(setting.dtype)
    allocate(network, setting.device)
    for name, parameter in network.named_parameters():
        if "norm" in name:
            parameter.detach().fill_(1.0)
        else:
            parameter.detach().normal_(std=parameter.shape[-1] ** -0.5)
    network.requires_grad_(False).eval()
    fused = setting.network.decoder.kernels
    for kernels in (None, fused) if fused is not None else (None,):
        if kernels is not None:
            network.fuse(kernels)
        way = "as it is served" if kernels is None else "with fused kernels"
        runner = MeasuredRunner(setting, Reserve(1, length, length))
        target = Target(network.decoder, TokenRange(0, config.llm.vocabulary - 1), runner=runner)
        run = passes_by_shape(target, WIDTHS[-1], _ROOM, length)
        for shape in (Shape(1, 1, length), *(Shape(1, width) for width in WIDTHS)):
            run(shape)
            yield _row(setting, name_of(shape), way, runner)
        yield {"what": "products", "way": way, "bits": target.describe_equality()}
        pixels = setting.random(_PICTURES, 3, SIDE, SIDE)
        runner.run("tower", partial(_see, network), (pixels,))
        yield _row(setting, f"tower, {_PICTURES} pictures", way, runner)


def _see(network: PaliGemma, pixels: Tensor) -> Tensors:
    return (network.see(pixels),)


def _row(setting: Setting, what: str, way: str, runner: MeasuredRunner) -> Row:
    step = runner.captures[-1].step
    return {"what": what, "way": way, "ms": setting.median_ms(step.replay)}
