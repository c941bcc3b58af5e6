"""Networks that draft from the target's hidden states: an EAGLE-style head, and Medusa's heads.

Shared by serving and by training, so that the two cannot disagree about them. The target's own
language-model head turns what comes out into tokens.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.model.kv_cache import CacheWindow, KVCache
from deft_policies.model.llama import (
    GATES,
    Attention,
    GatedMLP,
    LlamaAttention,
    RMSNorm,
    RotaryTable,
    added_mask,
    rotate_,
)
from deft_policies.model.products import product_of
from deft_policies.model.sizes import LlamaSizes

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels


def head_sizes(
    width: int, mlp_width: int, num_heads: int, num_kv_heads: int, **others: Any
) -> LlamaSizes:
    """The one layer of an EAGLE-style head, which has no vocabulary of its own."""
    others = {"max_positions": 4096, **others}
    head_dim = width // num_heads
    return LlamaSizes(0, width, mlp_width, 1, num_heads, num_kv_heads, head_dim, **others)


class EagleHead(nn.Module):
    """fc, then one Llama layer without an input norm and without a final norm.

    Position t pairs the target's hidden state f_t with the embedding of the token after it,
    e_{t+1}, and yields a guess of f_{t+1}. All are [row, position, width].
    """

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.sizes, self.width = sizes, sizes.width
        self.fc = nn.Linear(2 * sizes.width, sizes.width)
        self.attention = LlamaAttention(sizes)
        self.mlp_norm = RMSNorm(sizes.width, sizes.norm_eps)
        self.mlp = GatedMLP(sizes.width, sizes.mlp_width)
        self.rotary = RotaryTable(sizes)

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Teacher-forced: guess f_{t+1} at every position of whole sequences, for training.

        Causal unless a mask [row, 1, position, position] says otherwise. Rotary `positions` [row,
        position] count from 0 where none are given.
        """
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device)
            positions = positions.expand(hidden.shape[:2])
        return self.run(embeds, hidden, self.attend(hidden, positions, mask))

    def attend(
        self,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        window: CacheWindow | None = None,
    ) -> Attention:
        """The attention of a pass over pairs at [row, position]; causal where no mask is given."""
        cos, sin = self.rotary(positions, hidden)
        return Attention(self.sizes, cos, sin, mask, is_causal=mask is None, window=window)

    def read(self, embeds: Tensor, hidden: Tensor, attention: Attention) -> None:
        """Append the keys and values of pairs whose output is not needed."""
        fused = self.attention.qkv(self.fc(torch.cat((embeds, hidden), dim=-1)))
        attention.append(0, fused.unflatten(2, (-1, self.sizes.head_dim)))

    def run(self, embeds: Tensor, hidden: Tensor, attention: Attention) -> Tensor:
        """One pass; the output of the pairs that `attention` keeps."""
        mixed: Tensor = self.fc(torch.cat((embeds, hidden), dim=-1))
        attended = self.attention(mixed, attention)
        mixed = attention.keep(mixed.flatten(0, 1)).view_as(attended) + attended
        out: Tensor = mixed + self.mlp(self.mlp_norm(mixed))
        return out


class SteadyAttention(Attention):
    """Sums in float64, so that drafts do not hang on how many answers share a pass."""

    @property
    def sums_in(self) -> torch.dtype:
        """The format that scores and values are summed in."""
        return torch.float64

    def mix(self, layer: int, fused: Tensor) -> Tensor:
        """Mixed values [row * kept, inner] in the format of what is mixed."""
        return super().mix(layer, fused).to(fused.dtype)


class CachedPasses:
    """What passes over a cache whose memory never moves share, with fused kernels or without."""

    def __init__(
        self,
        sizes: LlamaSizes,
        rotary: RotaryTable,
        cache: KVCache,
        kernels: "FusedKernels | None",
    ) -> None:
        self._sizes, self._rotary, self._cache, self._kernels = sizes, rotary, cache, kernels

    def _rotation(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin; what is padding may lie beyond the last position."""
        rotation: tuple[Tensor, Tensor] = self._rotary(
            positions.clamp(max=self._sizes.max_positions - 1), like
        )
        return rotation

    def attention(
        self, like: Tensor, positions: Tensor, cache_positions: Tensor, seen: Tensor
    ) -> Attention:
        """Of tokens at rotary `positions` that are written to `places`, both [row, token].

        `seen` [row, 1, token, position] says what each of them sees.
        """
        num_rows, cache, sizes = len(cache_positions), self._cache, self._sizes
        cos, sin = self._rotation(positions, like)
        rows = torch.arange(num_rows, device=cache_positions.device)[:, None]
        strips = cache.data[:, :num_rows, : seen.shape[3]].transpose(2, 3)
        window = CacheWindow(
            targets=cache.flat.unbind(0),
            keys=strips[:, :, : sizes.num_kv_heads].unbind(0),
            values=strips[:, :, sizes.num_kv_heads :].unbind(0),
            index=(rows * cache.num_positions + cache_positions).flatten(),
        )
        if self._kernels is None:
            return Attention(sizes, cos, sin, added_mask(seen, like.dtype), window=window)
        return SteadyAttention(sizes, cos, sin, added_mask(seen, torch.float64), window=window)

    def _normed(self, mixed: Tensor, norm: nn.Module) -> Tensor:
        assert isinstance(norm, RMSNorm)
        if self._kernels is not None:
            return self._kernels.rms_norm(mixed, norm.weight, norm.eps)
        normed: Tensor = norm(mixed)
        return normed

    def _opened(self, gate_up: Tensor) -> Tensor:
        """gate(gate) * up."""
        if self._kernels is not None:
            return self._kernels.gate_times_up(gate_up, self._sizes.gate)
        gate, up = gate_up.chunk(2, dim=1)
        return GATES[self._sizes.gate](gate).mul_(up)


class HeadPasses(CachedPasses):
    """Runs a head over a cache whose memory never moves, with fused kernels where there are any.

    The arithmetic is that of `EagleHead.run`. Row r is slot r; weights must not be replaced.
    """

    def __init__(self, head: EagleHead, cache: KVCache, kernels: "FusedKernels | None") -> None:
        super().__init__(head.sizes, head.rotary, cache, kernels)
        self._norm = head.mlp_norm
        self._fc, self._qkv = product_of(head.fc, kernels), product_of(head.attention.qkv, kernels)
        self._out = product_of(head.attention.out, kernels)
        self._gate_up = product_of(head.mlp.gate_up, kernels)
        self._down = product_of(head.mlp.down, kernels)

    def run(self, embeds: Tensor, hidden: Tensor, attention: Attention) -> Tensor:
        """The output [kept, width] of pairs [row * token, width]: of those that are kept."""
        mixed = self._fc.apply(torch.cat((embeds, hidden), dim=1))
        attended = attention.mix(0, self._qkv.apply(mixed))
        mixed = attention.keep(mixed)
        mixed = added(mixed, self._out.add_to(mixed, attended))
        gate_up = self._gate_up.apply(self._normed(mixed, self._norm))
        return added(mixed, self._down.add_to(mixed, self._opened(gate_up)))

    def read(self, embeds: Tensor, hidden: Tensor, slot: Tensor) -> None:
        """Append pairs [token, width] to a slot, from position 0 on."""
        fused = self._qkv.apply(self._fc.apply(torch.cat((embeds, hidden), dim=1)))
        split = fused.view(1, len(fused), -1, self._sizes.head_dim)
        positions = torch.arange(len(fused), device=fused.device)[None]
        keys_values = split[:, :, self._sizes.num_heads :]
        rotate_(keys_values[:, :, : self._sizes.num_kv_heads], *self._rotation(positions, fused))
        index = (slot * self._cache.num_positions + positions).flatten()
        CacheWindow(targets=self._cache.flat.unbind(0), index=index).write(0, keys_values)


def added(residual: Tensor, branch: Tensor | None) -> Tensor:
    """With what a product has not added yet."""
    return residual if branch is None else residual.add_(branch)


class MedusaHeads(nn.Module):
    """h_k = h + silu(W_k h + b_k), k = 1..num_heads; head k looks k places behind the next token.

    Each is one residual block over the target's last hidden state, so heads are small.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.width, self.num_heads = width, num_heads
        self.weight = nn.Parameter(torch.zeros(num_heads, width, width))
        self.bias = nn.Parameter(torch.zeros(num_heads, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """From [..., width] to [..., head, width], to be read by the target's own head."""
        mixed = torch.einsum("...i,koi->...ko", hidden, self.weight) + self.bias
        return hidden.unsqueeze(-2) + functional.silu(mixed)
