"""The vision tower of Qwen2.5-VL: patches of a picture to tokens of the decoder.

Most blocks attend within windows of the picture, a few to all of it. Patches are put in the order
of windows first, and the tokens back in the picture's order at the end. Modules have the names of
the published files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.model.cpu_products import PackableLinear
from deft_policies.model.llama import RMSNorm
from deft_policies.model.quantization import Matrix

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels

# Of every checkpoint: pixels of a patch's side, patches of a side that become one token, and copies
# of a still picture in a patch.
PATCH, MERGE, FRAMES = 14, 2, 2
_NORM_EPS = 1e-6
_ROPE_THETA = 10000.0


@dataclass(frozen=True)
class QwenVisionSizes:
    """Everything that tells one tower from another."""

    width: int
    mlp_width: int
    num_blocks: int
    num_heads: int
    out_width: int  # of the decoder
    window: int  # pixels of a window's side
    full_blocks: frozenset[int]  # blocks that attend to the whole picture


@dataclass(frozen=True, eq=False)
class PictureLayout:
    """Where the patches of a picture of one size go, [patch] each."""

    order: Tensor  # merged places in the order of windows
    back: Tensor  # and back in the picture's order
    windows: tuple[int, ...]  # patches of each window
    cos: Tensor  # [patch, 1, 1, head_dim], in the order of windows
    sin: Tensor


class QwenVision(nn.Module):
    """Pictures of one size at a time: [picture, patch, number] to [picture, token, out_width]."""

    def __init__(self, sizes: QwenVisionSizes) -> None:
        super().__init__()
        self.sizes = sizes
        project = nn.Conv3d(3, sizes.width, (FRAMES, PATCH, PATCH), bias=False)
        self.patch_embed = nn.ModuleDict({"proj": project})
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.num_blocks))
        merged = sizes.width * MERGE**2
        out = nn.Sequential(
            PackableLinear(merged, merged), nn.GELU(), PackableLinear(merged, sizes.out_width)
        )
        self.merger = nn.ModuleDict({"ln_q": RMSNorm(sizes.width, _NORM_EPS), "mlp": out})
        self._layout = lru_cache(maxsize=8)(self._make_layout)
        self.kernels: FusedKernels | None = None  # for inference

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """`grid` is rows and columns of patches; patches of a merged place lie together."""
        layout = self._layout(grid, patches.device)
        # Its windows do not overlap: one matrix product.
        project = self.patch_embed.get_parameter("proj.weight").flatten(1)
        if self.kernels is not None and self.kernels.multiplies(project):
            hidden = self.kernels.look(patches.flatten(0, 1), Matrix(project))
            hidden = hidden.view(*patches.shape[:2], -1)
        else:
            hidden = functional.linear(patches, project)
        hidden = self._by_places(hidden)[:, layout.order].flatten(1, 2)
        for number, block in enumerate(self.blocks):
            is_full = number in self.sizes.full_blocks
            windows = (hidden.shape[1],) if is_full else layout.windows
            hidden = block(hidden, layout, windows, self.kernels)
        normed = _normed(self.merger["ln_q"], hidden, self.kernels)
        merged = self._by_places(normed).flatten(2)
        tokens: Tensor = self.merger["mlp"](merged)
        return tokens[:, layout.back]

    def _by_places(self, hidden: Tensor) -> Tensor:
        """[picture, merged place, patch in it, width]."""
        return hidden.view(len(hidden), -1, MERGE**2, hidden.shape[2])

    def _make_layout(self, grid: tuple[int, int], device: torch.device) -> PictureLayout:
        rows, columns = (side // MERGE for side in grid)
        side = self.sizes.window // PATCH // MERGE  # merged places of a window
        places = torch.arange(rows * columns).view(rows, columns)
        tiles = [
            places[top : top + side, left : left + side].flatten()
            for top in range(0, rows, side)
            for left in range(0, columns, side)
        ]
        order = torch.cat(tiles)
        angles = self._angles(rows, columns)[order].flatten(0, 1)[:, None, None]
        return PictureLayout(
            order=order.to(device),
            back=order.argsort().to(device),
            windows=tuple(len(tile) * MERGE**2 for tile in tiles),
            cos=angles.cos().to(device),
            sin=angles.sin().to(device),
        )

    def _angles(self, rows: int, columns: int) -> Tensor:
        """Of the row and then of the column of every patch [place, patch in it, head_dim]."""
        quarter = self.sizes.width // self.sizes.num_heads // 4
        frequencies = _ROPE_THETA ** (-torch.arange(quarter, dtype=torch.float32) / quarter)
        ranges = (torch.arange(side) for side in (rows, columns, MERGE, MERGE))
        row, column, row_in, column_in = torch.meshgrid(*ranges, indexing="ij")
        places = torch.stack((MERGE * row + row_in, MERGE * column + column_in), dim=-1)
        half = (places[..., None] * frequencies).view(rows * columns, MERGE**2, -1)
        return torch.cat((half, half), dim=-1)


class _Block(nn.Module):
    """Attention and a gated MLP, each behind a norm and added to a residual."""

    def __init__(self, sizes: QwenVisionSizes) -> None:
        super().__init__()
        self.num_heads = sizes.num_heads
        width, wide = sizes.width, sizes.mlp_width
        self.norm1, self.norm2 = RMSNorm(width, _NORM_EPS), RMSNorm(width, _NORM_EPS)
        self.attn = nn.ModuleDict(
            {"qkv": PackableLinear(width, 3 * width), "proj": PackableLinear(width, width)}
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": PackableLinear(width, wide),
                "up_proj": PackableLinear(width, wide),
                "down_proj": PackableLinear(wide, width),
            }
        )

    def forward(
        self,
        hidden: Tensor,
        layout: PictureLayout,
        windows: Sequence[int],
        kernels: "FusedKernels | None" = None,
    ) -> Tensor:
        """[picture, patch, width], patches seeing those of their window."""
        attended = self._attend(_normed(self.norm1, hidden, kernels), layout, windows)
        hidden = hidden + self.attn["proj"](attended)
        normed = _normed(self.norm2, hidden, kernels)
        gated = functional.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        outputs: Tensor = hidden + self.mlp["down_proj"](gated)
        return outputs

    def _attend(self, normed: Tensor, layout: PictureLayout, windows: Sequence[int]) -> Tensor:
        split = self.attn["qkv"](normed).unflatten(2, (3, self.num_heads, -1))
        queries, keys = _rotated(split[:, :, :2], layout).unbind(2)  # [picture, patch, head, ...]
        heads = [queries, keys, split[:, :, 2]]
        if len(set(windows)) == 1:  # all at once
            parts = [
                head.reshape(-1, windows[0], *head.shape[2:]).transpose(1, 2) for head in heads
            ]
            mixed = functional.scaled_dot_product_attention(*parts)
            return mixed.transpose(1, 2).reshape(normed.shape)
        by_window = [torch.split(head.transpose(1, 2), list(windows), dim=2) for head in heads]
        several = [
            functional.scaled_dot_product_attention(*window)
            for window in zip(*by_window, strict=True)
        ]
        return torch.cat(several, dim=2).transpose(1, 2).flatten(2)


def _normed(norm: nn.Module, hidden: Tensor, kernels: "FusedKernels | None") -> Tensor:
    """`RMSNorm` of [picture, patch, width]."""
    if kernels is None:
        normed: Tensor = norm(hidden)
        return normed
    assert isinstance(norm, RMSNorm)
    return kernels.rms_norm(hidden.flatten(0, 1), norm.weight, norm.eps).view(hidden.shape)


def _rotated(heads: Tensor, layout: PictureLayout) -> Tensor:
    """[picture, patch, kind, head, head_dim] rotated by the place of each patch, in float32."""
    wide = heads.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * layout.cos + turned * layout.sin).to(heads.dtype)
