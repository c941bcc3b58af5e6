"""Networks of 3B with random weights: what passes and towers take, with our kernels and without."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from deft_policies.decoding.captured import Shape
from deft_policies.decoding.target import Target
from deft_policies.model.graphs import Reserve, Step
from deft_policies.model.sizes import TokenRange
from deft_policies.model.vla import VlaNetwork, allocate
from scripts.bench.gpu.asking import Row
from scripts.bench.gpu.passes import name_of, passes_by_shape, profile
from scripts.bench.gpu.setting import MeasuredRunner, Setting

Network = TypeVar("Network", bound=VlaNetwork)
PICTURES = 2  # that a tower sees at once


@torch.inference_mode()
def draw(setting: Setting, make: Callable[[], Network]) -> Network:
    """A network of the device, norms apart with weights drawn at random."""
    with torch.device("meta"):
        network = make().to(setting.dtype)
    allocate(network, setting.device)
    for name, parameter in network.named_parameters():
        if "norm" in name or "ln_q" in name:
            parameter.detach().fill_(1.0)
        else:
            parameter.detach().normal_(std=parameter.shape[-1] ** -0.5)
    return network.requires_grad_(False).eval()


@torch.inference_mode()
def ask(
    setting: Setting,
    network: VlaNetwork,
    name: str,
    *,
    length: int,
    widths: Sequence[int],
    room: int,
    see: Step,
    frames: Tensor,
    is_served_fused: bool,
) -> Iterator[Row]:
    """A prefill of `length` positions, passes by width and the tower, without and with our kernels.

    Behind a prompt there is `room` for so many positions.
    """
    decoder, fused = network.decoder, setting.network.decoder.kernels
    for kernels in (None, fused) if fused is not None else (None,):
        if kernels is not None:
            network.fuse(kernels)
        way = "without fused kernels" if kernels is None else "with fused kernels"
        if (kernels is not None) == is_served_fused:
            way = "as it is served"
        runner = MeasuredRunner(setting, Reserve(1, length, length))
        target = Target(decoder, TokenRange(0, decoder.sizes.vocabulary - 1), runner=runner)
        run = passes_by_shape(target, widths[-1], room, length)
        for shape in (Shape(1, 1, length), *(Shape(1, width) for width in widths)):
            run(shape)
            yield {"what": name_of(shape), "way": way, "ms": _replayed(setting, runner)}
        yield {"what": "products", "way": way, "bits": target.describe_equality()}
        runner.run("tower", see, (frames,))
        counts = profile(setting, f"tower of {name}", runner.captures[-1].step.replay).counts
        row: Row = {"what": f"tower, {PICTURES} pictures", "way": way}
        yield {**row, "ms": _replayed(setting, runner), "launches": counts.total()}


def _replayed(setting: Setting, runner: MeasuredRunner) -> float:
    return setting.median_ms(runner.captures[-1].step.replay)
