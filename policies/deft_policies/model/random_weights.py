"""Models with random weights, built where they run: speed does not depend on values.

What they answer is noise. Nothing is read from disk, so the full-size model can be measured
without a checkpoint.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from deft_policies.model.formats import Quantization
from deft_policies.model.prompt import PromptTemplate
from deft_policies.model.sizes import (
    DINOV2,
    SIGLIP,
    ImageProcessorConfig,
    LlamaSizes,
    OpenVLAConfig,
    ResizeStrategy,
    find_action_tokens,
)
from deft_policies.model.statistics import ActionStatistics
from deft_policies.model.vla import OpenVLAModel

STATISTICS_KEY = "random"
_HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def openvla_7b() -> OpenVLAConfig:
    """The sizes of the published 7B."""
    return OpenVLAConfig(
        llm=_llama(32064, 4096, 11008, num_layers=32, num_heads=32),
        towers=(DINOV2, SIGLIP),
        image=ImageProcessorConfig(ResizeStrategy.NAIVE, 224, (127, 127, 127), (_HALVES,) * 2),
        action_tokens=find_action_tokens(text_vocab_size=32000),
        prompt_template=PromptTemplate.OPENVLA,
        statistics={STATISTICS_KEY: unit_statistics()},
    )


def ecot_7b() -> OpenVLAConfig:
    """The 7B with answers of 257 tokens, as many as ECoT writes for a frame."""
    return replace(openvla_7b(), statistics={STATISTICS_KEY: unit_statistics(257)})


def openvla_small() -> OpenVLAConfig:
    """A model that answers on a laptop, with the 7B's ratio of decoder to towers."""
    towers = (replace(tower, width=96, depth=5, heads=3, mlp=384) for tower in (DINOV2, SIGLIP))
    return replace(
        openvla_7b(),
        llm=_llama(1088, 256, 688, num_layers=12, num_heads=8),
        towers=tuple(towers),
        action_tokens=find_action_tokens(text_vocab_size=1024),
    )


def _llama(
    vocabulary: int, width: int, mlp_width: int, num_layers: int, num_heads: int
) -> LlamaSizes:
    head_dim = width // num_heads
    return LlamaSizes(vocabulary, width, mlp_width, num_layers, num_heads, num_heads, head_dim)


NAMED_SIZES: Mapping[str, Callable[[], OpenVLAConfig]] = MappingProxyType(
    {"openvla-7b": openvla_7b, "small": openvla_small, "ecot-7b": ecot_7b}
)


def unit_statistics(length: int = 7) -> ActionStatistics:
    """Dimensions from -1 to 1; the last, the gripper, from 0 to 1 as it is."""
    low, high = np.full(length, -1.0), np.ones(length)
    low[-1] = 0.0
    return ActionStatistics(low, high, np.arange(length) < length - 1)


@torch.no_grad()
def build_random_model(
    config: OpenVLAConfig,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    quantization: Quantization = Quantization.NONE,
) -> OpenVLAModel:
    """Allocate and fill on the device; activations keep their size through every layer."""
    model = OpenVLAModel.empty(config, device, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        _fill(name, parameter, generator)
    model.requires_grad_(False)
    for index in range(len(model.decoder.layers)):
        model.quantize_layer(index, quantization, device)
    return model


def _fill(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    is_scale = name.rsplit(".", 1)[-1] in ("scale1", "scale2") or "norm" in name
    if is_scale and not name.endswith("bias"):
        parameter.fill_(1.0)
    elif parameter.dim() == 1:
        parameter.zero_()
    else:
        fan_in = 1 if "embedding" in name else parameter[0].numel()
        parameter.normal_(std=min(1.0, fan_in**-0.5), generator=generator)


def word_ids(num_ids: int, instruction: str) -> tuple[int, ...]:
    """Prompt ids below `num_ids` without a tokenizer, always the same for the same text.

    As many as a real tokenizer would give, within a few.
    """
    pieces = [instruction[i : i + 4].encode() for i in range(0, len(instruction), 4)]
    wrapped = range(2, 16)  # what the prompt puts around an instruction
    return (1, *wrapped, *(sum(piece) % num_ids for piece in pieces), 3)
