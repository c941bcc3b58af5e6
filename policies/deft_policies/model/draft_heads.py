"""Networks that draft from the target's hidden states: an EAGLE-style head, and Medusa's heads.

Shared by serving and by training, so that the two cannot disagree about them. The target's own
language-model head turns what comes out into tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.model.kv_cache import CacheWindow
from deft_policies.model.llama import Attention, GatedMLP, LlamaAttention, RMSNorm, RotaryTable
from deft_policies.model.sizes import LlamaSizes


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
        """Append the keys and values of pairs whose output nobody asks for."""
        fused = self.attention.qkv(self.fc(torch.cat((embeds, hidden), dim=-1)))
        attention.append(0, fused.unflatten(2, (-1, self.sizes.head_dim)))

    def run(self, embeds: Tensor, hidden: Tensor, attention: Attention) -> Tensor:
        """One pass; the output of the pairs that `attention` keeps."""
        mixed: Tensor = self.fc(torch.cat((embeds, hidden), dim=-1))
        attended = self.attention(mixed, attention)
        mixed = attention.keep(mixed.flatten(0, 1)).view_as(attended) + attended
        out: Tensor = mixed + self.mlp(self.mlp_norm(mixed))
        return out


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
