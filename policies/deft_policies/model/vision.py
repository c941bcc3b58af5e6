"""One vision transformer for both towers: DINOv2 with registers and LayerScale, and SigLIP.

A tower yields what its second-to-last block returns, without the final norm. The last block, the
final norm and SigLIP's pooling head are in every checkpoint and are never used, so they are not
here.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.model.packed import PackableLinear
from deft_policies.model.sizes import LAYER_NORM_EPS, TowerConfig

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels


class Projector(nn.Module):
    """An MLP: three layers for the fused towers (inner width 4 x vision), two for a single one."""

    def __init__(self, vision_width: int, width: int, is_fused: bool) -> None:
        super().__init__()
        inner = 4 * vision_width if is_fused else width
        self.fc1 = PackableLinear(vision_width, inner, has_gelu=True)
        self.fc2 = PackableLinear(inner, width, has_gelu=is_fused)
        self.fc3 = PackableLinear(width, width) if is_fused else None

    def forward(self, patches: Tensor) -> Tensor:
        """[row, patch, vision_width] to [row, patch, width]."""
        projected: Tensor = self.fc2(self.fc1(patches))
        return projected if self.fc3 is None else self.fc3(projected)


class Block(nn.Module):
    """Pre-norm attention and MLP, each scaled per channel where the tower has LayerScale."""

    def __init__(self, sizes: TowerConfig) -> None:
        super().__init__()
        width, eps = sizes.width, LAYER_NORM_EPS
        self.num_heads = sizes.heads
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.qkv = PackableLinear(width, 3 * width)
        self.out = PackableLinear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp_in = PackableLinear(width, sizes.mlp, has_gelu=True)
        self.mlp_out = PackableLinear(sizes.mlp, width)
        self.scale1 = nn.Parameter(torch.ones(width)) if sizes.is_dino else None
        self.scale2 = nn.Parameter(torch.ones(width)) if sizes.is_dino else None

    def forward(self, tokens: Tensor, modulation: Tensor | None = None) -> Tensor:
        """[row, token, width] in and out; see `VisionTransformer.forward` for the modulation."""
        mixed = self.attend(self.norm1(tokens))
        tokens = tokens + (mixed if self.scale1 is None else mixed * self.scale1)
        if modulation is not None:
            scale, shift = modulation.unsqueeze(2)
            tokens = tokens * (1 + scale) + shift
        lowered = self.lower(self.norm2(tokens))
        return tokens + (lowered if self.scale2 is None else lowered * self.scale2)

    def lower(self, tokens: Tensor) -> Tensor:
        """The MLP of normalised tokens."""
        lowered: Tensor = self.mlp_out(self.mlp_in(tokens))
        return lowered

    def attend(self, tokens: Tensor) -> Tensor:
        """The attention of normalised tokens."""
        fused = self.qkv(tokens).unflatten(2, (3, self.num_heads, -1)).transpose(1, 3)
        queries, keys, values = fused.unbind(2)  # [row, head, token, head_dim]
        mixed = functional.scaled_dot_product_attention(queries, keys, values)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class VisionTransformer(nn.Module):
    """Pixels to patch features."""

    def __init__(self, sizes: TowerConfig) -> None:
        super().__init__()
        self.sizes = sizes
        self.patch = nn.Conv2d(3, sizes.width, sizes.patch_size, sizes.patch_size)
        self.position = nn.Parameter(torch.zeros(1, sizes.num_patches, sizes.width))
        if sizes.is_dino:
            self.class_token = nn.Parameter(torch.zeros(1, 1, sizes.width))
            self.registers = nn.Parameter(torch.zeros(1, sizes.num_leading - 1, sizes.width))
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_used_blocks))
        self.kernels: FusedKernels | None = None  # for inference

    def forward(self, pixels: Tensor, modulations: Tensor | None = None) -> Tensor:
        """[row, 3, height, width] to [row, patch, width].

        `modulations` [block, 2, row, width] are a scale and a shift of every channel, which each
        block applies to all its tokens between attention and MLP (FiLM).
        """
        tokens = self._embed(pixels)
        if self.sizes.is_dino:
            before = (self.class_token, self.registers)
            wide = [part.expand(len(pixels), -1, -1) for part in before]
            tokens = torch.cat((*wide, tokens), dim=1)
        if self.kernels is None or modulations is not None:
            for index, block in enumerate(self.blocks):
                tokens = block(tokens, None if modulations is None else modulations[index])
        else:
            tokens = self._run_fused(tokens, self.kernels)
        return tokens[:, -self.sizes.num_patches :]

    def _run_fused(self, tokens: Tensor, kernels: "FusedKernels") -> Tensor:
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        normed = blocks[0].norm1(tokens)
        for block, after in zip(blocks, [*blocks[1:], blocks[-1]], strict=True):
            mixed = block.attend(normed)
            tokens, normed = kernels.add_layer_norm(tokens, mixed, block.scale1, block.norm2)
            lowered = block.lower(normed)
            tokens, normed = kernels.add_layer_norm(tokens, lowered, block.scale2, after.norm1)
        return tokens

    def _embed(self, pixels: Tensor) -> Tensor:
        """The patch convolution as one matrix product: its windows do not overlap."""
        size = self.sizes.patch_size
        side = pixels.shape[2] // size
        windows = pixels.reshape(-1, 3, side, size, side, size).permute(0, 2, 4, 1, 3, 5)
        flat = windows.flatten(3).flatten(1, 2)
        return (
            functional.linear(flat, self.patch.weight.flatten(1), self.patch.bias) + self.position
        )
