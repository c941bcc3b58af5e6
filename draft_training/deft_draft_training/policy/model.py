"""A small model of OpenVLA's architecture, and the head that helps it learn and is then dropped."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deft_policies.model.prompt import PromptTemplate
from deft_policies.model.sizes import (
    ActionVocabulary,
    ImageProcessorConfig,
    LlamaConfig,
    Normalization,
    OpenVLAConfig,
    ResizeStrategy,
    TowerConfig,
    TowerFamily,
)
from deft_policies.model.statistics import ActionStatistics
from deft_policies.model.vla import OpenVLAModel

_PREFIXES = {
    TowerFamily.DINOV2: "vision_backbone.featurizer",
    TowerFamily.SIGLIP: "vision_backbone.fused_featurizer",
}
_NORMALIZATIONS = (
    Normalization((0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375)),
    Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
)


@dataclass(frozen=True)
class PolicyModelConfig:
    """Sizes. A tower's last block is never used, so `tower_depth` counts one block in vain."""

    image_size: int = 168
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
        TowerConfig(
            family=family,
            prefix=prefix,
            width=sizes.tower_width,
            depth=sizes.tower_depth,
            heads=sizes.tower_heads,
            mlp=sizes.tower_mlp,
            image_size=sizes.image_size,
            patch_size=sizes.patch_size,
        )
        for family, prefix in _PREFIXES.items()
    )
    multiple = sizes.vocabulary_multiple
    bins = ActionVocabulary(0).num_bins
    text = -(-(num_words + bins) // multiple) * multiple
    return OpenVLAConfig(
        llm=LlamaConfig(
            vocab_size=text + multiple,
            width=sizes.width,
            mlp=sizes.mlp,
            num_layers=sizes.num_layers,
            heads=sizes.heads,
            kv_heads=sizes.heads,
            head_width=sizes.width // sizes.heads,
        ),
        towers=towers,
        image=ImageProcessorConfig(
            resize=ResizeStrategy.NAIVE,
            size=sizes.image_size,
            letterbox_fill=(0, 0, 0),
            normalizations=_NORMALIZATIONS,
        ),
        vocabulary=ActionVocabulary(text),
        prompt_template=PromptTemplate.OPENVLA,
        statistics=statistics,
    )


@dataclass(frozen=True)
class PolicyOutput:
    """What one training forward yields."""

    logits: Tensor  # [row, dim, token]
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
        self.position_head = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, num_positions)
        )

    def forward(self, pixels: Tensor, prompts: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        """Hidden states that predict the action tokens, [row, dim, width].

        `prompts` [row, text] is right-padded, `lengths` [row] counts its real ids, `labels`
        [row, dim] are the action tokens; all but the last are fed back, as when decoding.
        """
        rows, dims = labels.shape
        steps = torch.arange(dims, device=labels.device)
        ids = torch.cat([prompts, prompts.new_zeros(rows, dims - 1)], dim=1)
        ids = ids.scatter(1, lengths[:, None] + steps[:-1], labels[:, :-1])
        hidden: Tensor = self.model(pixels, ids)
        first = self.config.num_patches + lengths - 1
        wanted = (first[:, None] + steps)[..., None]
        return hidden.gather(1, wanted.expand(-1, -1, hidden.shape[-1]))

    def read(self, hidden: Tensor) -> PolicyOutput:
        """Token scores and the position guess, from `forward`'s hidden states."""
        logits: Tensor = self.model.decoder.head(hidden)
        return PolicyOutput(logits, self.position_head(hidden[:, 0]))


def initialise(net: PolicyNet, seed: int) -> None:
    """Small normal weights, residual outputs scaled down by depth, LayerScale at a tenth."""
    generator = torch.Generator().manual_seed(seed)
    depth = net.config.llm.num_layers
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
