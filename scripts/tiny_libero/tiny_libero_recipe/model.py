"""A small model of OpenVLA's architecture, and the head that helps it learn and is then dropped."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from deft_policies.model.prompt import PromptTemplate
from deft_policies.model.sizes import (
    DEFAULT_NUM_BINS,
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

_LAYER = re.compile(r"(.*\bdecoder\.layers\.)(\d+)(\..*)")
_ADDS_TO_STREAM = (".attention.out.weight", ".mlp.down.weight")
_NORMALIZATIONS = (
    ((0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375)),
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
)


@dataclass(frozen=True)
class PolicyModelConfig:
    """Sizes. A tower's last block is never used, so `tower_depth` counts one block in vain."""

    image_size: int = 224
    patch_size: int = 28
    tower_width: int = 128
    tower_depth: int = 4
    tower_heads: int = 4
    tower_mlp: int = 512
    width: int = 192
    num_layers: int = 12
    heads: int = 6
    mlp: int = 512
    vocabulary_multiple: int = 64


def build_config(
    sizes: PolicyModelConfig, num_words: int, statistics: Mapping[str, ActionStatistics]
) -> OpenVLAConfig:
    """The configuration of a small model whose tokenizer knows `num_words` ids besides actions."""
    towers = tuple(
        replace(
            one,
            width=sizes.tower_width,
            depth=sizes.tower_depth,
            heads=sizes.tower_heads,
            mlp=sizes.tower_mlp,
            image_size=sizes.image_size,
            patch_size=sizes.patch_size,
        )
        for one in (DINOV2, SIGLIP)
    )
    multiple = sizes.vocabulary_multiple
    text = -(-(num_words + DEFAULT_NUM_BINS) // multiple) * multiple
    return OpenVLAConfig(
        llm=LlamaSizes(
            vocabulary=text + multiple,
            width=sizes.width,
            mlp_width=sizes.mlp,
            num_layers=sizes.num_layers,
            num_heads=sizes.heads,
            num_kv_heads=sizes.heads,
            head_dim=sizes.width // sizes.heads,
        ),
        towers=towers,
        image=ImageProcessorConfig(
            resize=ResizeStrategy.NAIVE,
            size=sizes.image_size,
            letterbox_fill=(0, 0, 0),
            normalizations=_NORMALIZATIONS,
        ),
        action_tokens=find_action_tokens(text),
        prompt_template=PromptTemplate.OPENVLA,
        statistics=statistics,
    )


@dataclass(frozen=True)
class PolicyOutput:
    """What one training forward yields."""

    logits: Tensor  # [row, step, token]
    positions: Tensor  # [row, value], the auxiliary head's guess


class PolicyNet(nn.Module):
    """The model that is kept, and a head that tells positions from the last prompt state.

    Knowing where gripper, object and target are is what the picture is for; asking for it outright
    teaches the towers faster than actions alone do.
    """

    def __init__(self, config: OpenVLAConfig, num_positions: int) -> None:
        super().__init__()
        self.config = config
        self.model = OpenVLAModel(config)
        width = config.llm.width
        self.position_head = position_head(width, num_positions)

    def forward(self, pixels: Tensor, ids: Tensor, prompt_lengths: Tensor, steps: int) -> Tensor:
        """Hidden states that predict the answer's tokens, [row, step, width].

        `ids` [row, text] are prompt and answer, right-padded; `prompt_lengths` [row] say where the
        answers begin. What is behind a shorter answer's end means nothing.
        """
        hidden: Tensor = self.model(pixels, ids)
        first = self.config.num_patches + prompt_lengths - 1
        wanted = first[:, None] + torch.arange(steps, device=ids.device)
        wanted = wanted.clamp(max=hidden.shape[1] - 1)[..., None]
        return hidden.gather(1, wanted.expand(-1, -1, hidden.shape[-1]))

    def read(self, hidden: Tensor) -> PolicyOutput:
        """Token scores and the position guess, from `forward`'s hidden states."""
        logits: Tensor = self.model.decoder.head(hidden)
        return PolicyOutput(logits, self.position_head(hidden[:, 0]))


def position_head(width: int, num_values: int) -> nn.Sequential:
    """Tells positions from a hidden state; only training has it."""
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, num_values))


def initialise(net: nn.Module, seed: int) -> None:
    """Small normal weights, residual outputs scaled down by depth, LayerScale at a tenth."""
    generator = torch.Generator().manual_seed(seed)
    depth = count_layers(net.state_dict())
    for name, parameter in net.named_parameters():
        if parameter.ndim >= 2:
            spread = min(0.02 * 4, parameter[0].numel() ** -0.5)
            is_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            spread = spread / (2 * depth) ** 0.5 if is_residual else spread
            nn.init.normal_(parameter, std=spread, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif name.endswith(("scale1", "scale2")):
            nn.init.constant_(parameter, 0.1)


def count_layers(weights: Mapping[str, Tensor]) -> int:
    """How many decoder layers a state dict has."""
    found = (_LAYER.fullmatch(name) for name in weights)
    return len({match.group(2) for match in found if match})


def deepened(weights: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The weights of a decoder of `num_layers`, at least as many as there are, that computes alike.

    A shallow policy learns in less time than a deep one; half-way, layers that add nothing yet are
    put between its own. A new layer is a copy of the one before it whose outputs are zero.
    """
    old = count_layers(weights)
    sources = [number * old // num_layers for number in range(num_layers)]
    grown: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            grown[name] = tensor
            continue
        before, number, rest = match.groups()
        copies = [new for new, source in enumerate(sources) if source == int(number)]
        for new in copies:
            is_silent = new != copies[0] and rest.endswith(_ADDS_TO_STREAM)
            grown[f"{before}{new}{rest}"] = tensor.new_zeros(tensor.shape) if is_silent else tensor
    return grown
