"""What PaliGemma has that Llama and OpenVLA's towers have not.

Gemma-1's layers are Llama's but for two things: the MLP opens by GELU (`LlamaSizes.gate`), and the
norms multiply by 1 + weight; the loader adds the 1. In front, embeddings of words are
multiplied by the root of the width, and those of pictures are not. Its tower is SigLIP as a whole:
the last block and the final norm are used, and GELU is the one by tanh.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.model.sizes import LAYER_NORM_EPS, TowerConfig
from deft_policies.model.vla import Block, VisionTransformer


class ScaledEmbedding(nn.Embedding):
    """A table of words whose rows are multiplied by the root of their width."""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__(num_rows, width, _weight=torch.empty(num_rows, width))
        self._scales: dict[torch.dtype, float] = {}

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] to [..., width]. The factor, too, is a number of the table's format."""
        dtype = self.weight.dtype
        if dtype not in self._scales:
            root = torch.tensor(math.sqrt(self.embedding_dim), dtype=dtype, device="cpu")
            self._scales[dtype] = float(root)
        return functional.embedding(tokens, self.weight) * self._scales[dtype]


class SiglipBlock(Block):
    """A block whose MLP has the GELU by tanh."""

    def __init__(self, sizes: TowerConfig) -> None:
        super().__init__(sizes)
        self.mlp_in.has_gelu = False

    def lower(self, tokens: Tensor) -> Tensor:
        """The MLP of normalised tokens."""
        lowered: Tensor = self.mlp_out(functional.gelu(self.mlp_in(tokens), approximate="tanh"))
        return lowered


class SiglipTower(VisionTransformer):
    """Pixels [picture, 3, height, width] to features of patches [picture, patch, width]."""

    def __init__(self, sizes: TowerConfig) -> None:
        super().__init__(sizes)
        self.blocks = nn.ModuleList(SiglipBlock(sizes) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(sizes.width, eps=LAYER_NORM_EPS)

    def forward(self, pixels: Tensor, modulations: Tensor | None = None) -> Tensor:
        """Nothing modulates it."""
        features: Tensor = self.norm(super().forward(pixels, modulations))
        return features
