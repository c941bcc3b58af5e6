"""The attention of a pass of fixed shape by fused kernels: one launch rotates and appends keys and
values, two attend.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deft_policies.model.llama import added_mask
from deft_policies.model.sizes import LlamaSizes

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels


@dataclass(frozen=True)
class FusedAttention:
    """Rows of a pass are slots of the cache, side by side."""

    sizes: LlamaSizes
    kernels: "FusedKernels"
    rotation: tuple[Tensor, Tensor]  # cos and sin, [token, head_dim]
    layers: tuple[Tensor, ...]  # [layer] of the rows' slots, [row, position, 2 * head, head_dim]
    index: Tensor  # [token], where keys and values go, counted over all positions of all slots
    targets: tuple[Tensor, ...]  # [layer] of all slots
    mask: Tensor  # [row, 1, token, position], added to the scores
    ends: Tensor  # [row, token]: no position is seen from there on
    kept: Tensor | None = None  # [kept], flat indices of the tokens whose output is wanted

    @staticmethod
    def of(
        sizes: LlamaSizes,
        kernels: "FusedKernels",
        rotation: tuple[Tensor, Tensor],
        data: Tensor,
        slots: slice,
        index: Tensor,
        seen: Tensor,
    ) -> "FusedAttention":
        """Over the `slots` of a cache's `data`; `seen` [row, 1, token, position] by each token."""
        cos, sin = (one.reshape(-1, sizes.head_dim) for one in rotation)
        places = torch.arange(1, seen.shape[3] + 1, device=seen.device)
        ends = (seen * places).amax(3)[:, 0]
        mask = added_mask(seen, torch.float32)
        layers, targets = data[:, slots].unbind(0), data.unbind(0)
        return FusedAttention(sizes, kernels, (cos, sin), layers, index, targets, mask, ends)

    @property
    def num_out(self) -> int:
        """Tokens whose output is wanted."""
        return self.ends.numel()

    def mix(self, layer: int, fused: Tensor) -> Tensor:
        """Positions are split among programs where queries are few."""
        kernels = self.kernels
        kernels.rotate_append(fused, self.rotation, self.targets[layer], self.index, self.sizes)
        return kernels.attend(
            self.keep(fused), self.layers[layer], self.mask, self.ends, self.sizes
        )

    def keep(self, hidden: Tensor) -> Tensor:
        """Of [token, width] the tokens whose output is wanted."""
        return hidden if self.kept is None else hidden.index_select(0, self.kept)

    def of_rows_out(self, rows_out: Tensor) -> "FusedAttention":
        """That of a layer which computes the tokens [row, kept] only."""
        rows = torch.arange(len(rows_out), device=rows_out.device)[:, None] * self.ends.shape[1]
        index = rows_out[:, None, :, None].expand(-1, -1, -1, self.mask.shape[3])
        return replace(
            self,
            kept=(rows_out + rows).flatten(),
            mask=self.mask.gather(2, index),
            ends=self.ends.gather(1, rows_out),
        )
