"""The EAGLE-style draft head: one decoder layer that continues the target's last hidden states.

Shared by serving and by training, so the two cannot disagree about it. Position t pairs the hidden
state f_t with the embedding of the token after it, e_{t+1}, and yields a guess of f_{t+1}, which
the target's own language-model head turns into tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deft_policies.decoding.plan import KeyMask
from deft_policies.model.kv_cache import CacheSizes, LayerCache
from deft_policies.model.llama import (
    Attention,
    GatedMLP,
    LlamaSizes,
    PassContext,
    RMSNorm,
    RotaryTable,
    take_rows,
)


@dataclass(frozen=True)
class HeadSizes:
    """Everything that tells one draft head from another."""

    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_positions: int = 4096
    has_qkv_bias: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.width // self.num_heads

    @property
    def cache(self) -> CacheSizes:
        """What one position leaves in a key/value cache."""
        return CacheSizes(1, self.num_kv_heads, self.head_dim)


class EagleHead(nn.Module):
    """fc, then one Llama layer without an input norm and without a final norm."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.sizes = sizes
        llama = _llama_sizes(sizes)
        self.fc = nn.Linear(2 * sizes.width, sizes.width)
        self.attention = Attention(llama)
        if sizes.has_qkv_bias:
            fused = self.attention.qkv
            self.attention.qkv = nn.Linear(fused.in_features, fused.out_features)
        self.mlp_norm = RMSNorm(sizes.width, sizes.norm_eps)
        self.mlp = GatedMLP(sizes.width, sizes.mlp_width)
        self.rotary = RotaryTable(llama)

    def forward(self, embeds: Tensor, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Teacher-forced: guess f_{t+1} at every position of whole sequences, for training.

        `embeds` is e_{t+1} and `hidden` is f_t, both [row, position, width]. Causal unless a mask
        [row, 1, position, position] says otherwise; see `key_mask`.
        """
        positions = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
        context = PassContext(self.rotary(positions, hidden), mask=mask, is_causal=mask is None)
        return self.run(embeds, hidden, context, None)

    def run(
        self, embeds: Tensor, hidden: Tensor, context: PassContext, cache: LayerCache | None
    ) -> Tensor:
        """One pass, through a cache if there is one; the output of `context.rows_out` if given."""
        mixed: Tensor = self.fc(torch.cat((embeds, hidden), dim=-1))
        attended = self.attention(mixed, context, cache)
        if context.rows_out is not None:
            mixed = take_rows(mixed, context.rows_out)
        mixed = mixed + attended
        out: Tensor = mixed + self.mlp(self.mlp_norm(mixed))
        return out


def key_mask(kind: KeyMask, prompt_lengths: Tensor, num_positions: int) -> Tensor:
    """The attention mask of whole sequences, [row, 1, position, position].

    With `PREFIX_ONLY`, action positions (from the prompt's last one on) see only the positions
    before the prompt's last one, not even themselves.
    """
    positions = torch.arange(num_positions, device=prompt_lengths.device)
    causal = positions <= positions[:, None]
    if kind is KeyMask.CAUSAL:
        return causal.expand(len(prompt_lengths), 1, -1, -1)
    edge = (prompt_lengths - 1)[:, None, None, None]
    is_action = positions[:, None] >= edge
    return torch.where(is_action, positions < edge, causal)


def _llama_sizes(sizes: HeadSizes) -> LlamaSizes:
    return LlamaSizes(
        vocabulary=1,
        width=sizes.width,
        mlp_width=sizes.mlp_width,
        num_layers=1,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        norm_eps=sizes.norm_eps,
        rope_theta=sizes.rope_theta,
        max_positions=sizes.max_positions,
    )
