"""A block head: a small network that drafts several tokens in one pass (DFlash, DSpark 2026).

It reads the target's hidden states behind several layers at every committed position, and answers
with a hidden state for each place of a block behind the last token. The target's own head turns
those into logits; a Markov head adds what the token at the place before says, so that places can be
chosen one after the other for little. A confidence head says how likely a draft is to stand where
all before it do.

Shared by serving and by training, so that the two cannot disagree about it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.model.draft_heads import CachedPasses, added
from deft_policies.model.kv_cache import CacheWindow, KVCache
from deft_policies.model.llama import (
    Attention,
    Layer,
    RMSNorm,
    RotaryTable,
    rotate_,
)
from deft_policies.model.products import product_of
from deft_policies.model.sizes import LlamaSizes, TokenRange

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels


@dataclass(frozen=True)
class BlockSizes:
    """What a block head is made of."""

    backbone: LlamaSizes  # its layers; it has no vocabulary of its own
    read_layers: tuple[int, ...]  # of the target, counted from 1; the final states are read, too
    places: int  # tokens that a block drafts
    tokens: TokenRange  # what it can draft
    rank: int  # of the Markov head


class BlockHead(nn.Module):
    """Fusion, a backbone whose places see each other, a Markov head and a confidence head.

    The first place is the last committed token, whose hidden state is not known yet; each further
    one begins as the same learned vector. Place k answers for the token k + 1 behind that token.
    Keys and values of committed positions come from the fused states of the target, by the same
    matrices in each layer as those of the block.
    """

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.sizes, self.width = sizes, sizes.backbone.width
        num_states, num_tokens = len(sizes.read_layers) + 1, len(sizes.tokens)
        self.fuse = nn.Linear(num_states * self.width, self.width, bias=False)
        self.fused_norm = RMSNorm(self.width, sizes.backbone.norm_eps)
        self.further = nn.Parameter(torch.zeros(self.width))
        self.layers = nn.ModuleList(Layer(sizes.backbone) for _ in range(sizes.backbone.num_layers))
        self.norm = RMSNorm(self.width, sizes.backbone.norm_eps)
        self.before = nn.Embedding(num_tokens + 1, sizes.rank)  # the last row: any other token
        self.markov = nn.Linear(sizes.rank, num_tokens, bias=False)
        self.chance = nn.Linear(self.width + sizes.rank, 1)
        self.rotary = RotaryTable(sizes.backbone)

    @property
    def backbone(self) -> list[Layer]:
        """Its layers."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def context(self, states: Tensor) -> Tensor:
        """Fused states of committed positions, from [..., states * width] to [..., width]."""
        fused: Tensor = self.fused_norm(self.fuse(states))
        return fused

    def block(self, embeds: Tensor) -> Tensor:
        """What the backbone begins with, [row, place, width], from embeddings [row, width]."""
        further = self.further.expand(len(embeds), self.sizes.places - 1, -1)
        return torch.cat((embeds[:, None], further), dim=1)

    def keys_values(self, layer: int, fused: Tensor, positions: Tensor) -> Tensor:
        """Of fused states [row, position, width]: [row, position, 2 * head, head_dim], rotated."""
        sizes = self.sizes.backbone
        qkv = self.backbone[layer].attention.qkv
        weight, bias = qkv.weight, qkv.bias
        first = sizes.num_heads * sizes.head_dim  # behind the queries
        pairs = functional.linear(fused, weight[first:], None if bias is None else bias[first:])
        pairs = pairs.view(*pairs.shape[:2], -1, sizes.head_dim)
        cos, sin = self.rotary(positions, fused)
        keys, values = pairs.chunk(2, dim=2)
        keys = keys.clone()
        rotate_(keys, cos, sin)
        return torch.cat((keys, values), dim=2)

    def append(self, states: Tensor, positions: Tensor, window: CacheWindow) -> None:
        """Append the keys and values of committed positions [row, position] to a cache."""
        fused = self.context(states)
        for index in range(len(self.layers)):
            window.write(index, self.keys_values(index, fused, positions))

    def run(self, embeds: Tensor, positions: Tensor, window: CacheWindow) -> Tensor:
        """One pass over a cache: hidden states [row, place, width] behind tokens [row, width].

        The block's own keys and values are written to the cache, behind the committed positions,
        and are overwritten by what is committed there later.
        """
        hidden = self.block(embeds)
        cos, sin = self.rotary(positions, hidden)
        attention = Attention(self.sizes.backbone, cos, sin, window=window)
        for index, layer in enumerate(self.backbone):
            mixed = attention.mix(index, layer.attention.qkv(layer.attention_norm(hidden)))
            hidden = hidden + layer.attention.out(mixed.view(*hidden.shape[:2], -1))
            hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
        states: Tensor = self.norm(hidden)
        return states

    def forward(self, states: Tensor, embeds: Tensor, anchors: Tensor) -> Tensor:
        """Teacher-forced: many blocks behind tokens of whole sequences, for training.

        `states` [row, position, states * width] of the target; `embeds` [row, block, width] of the
        tokens that blocks begin with, at positions `anchors` [row, block]. A block sees the
        positions before its own token, and itself. Returns [row, block, place, width].
        """
        num_rows, num_blocks = anchors.shape
        places, sizes = self.sizes.places, self.sizes.backbone
        fused = self.context(states)
        known = torch.arange(states.shape[1], device=states.device).expand(num_rows, -1)
        hidden = self.block(embeds.flatten(0, 1)).view(num_rows, num_blocks * places, -1)
        positions = anchors[:, :, None] + torch.arange(places, device=anchors.device)
        positions = positions.flatten(1).clamp(max=sizes.max_positions - 1)
        sees = self._sees(known, anchors)
        cos, sin = self.rotary(positions, hidden)
        for index, layer in enumerate(self.backbone):
            split = layer.attention.qkv(layer.attention_norm(hidden))
            split = split.unflatten(2, (-1, sizes.head_dim))
            num_heads, num_kv_heads = sizes.num_heads, sizes.num_kv_heads
            turned, values = split.split((num_heads + num_kv_heads, num_kv_heads), dim=2)
            turned = turned * cos + torch.roll(turned, sizes.head_dim // 2, -1) * sin
            queries, keys = turned.split((num_heads, num_kv_heads), dim=2)
            before = self.keys_values(index, fused, known)
            old_keys, old_values = before.chunk(2, dim=2)
            mixed = functional.scaled_dot_product_attention(
                queries.transpose(1, 2),
                torch.cat((old_keys, keys), dim=1).transpose(1, 2),
                torch.cat((old_values, values), dim=1).transpose(1, 2),
                attn_mask=sees[:, None],
                enable_gqa=num_kv_heads != num_heads,
            )
            hidden = hidden + layer.attention.out(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
        found: Tensor = self.norm(hidden)
        return found.view(num_rows, num_blocks, places, -1)

    def _sees(self, known: Tensor, anchors: Tensor) -> Tensor:
        """Who sees what, [row, block * place, position + block * place]."""
        places = self.sizes.places
        committed = known[:, None] < anchors[:, :, None]
        committed = committed.repeat_interleave(places, dim=1)
        block = torch.arange(anchors.shape[1] * places, device=anchors.device) // places
        in_block = (block[:, None] == block).expand(len(anchors), -1, -1)
        return torch.cat((committed, in_block), dim=2)

    def previous_embeds(self, tokens: Tensor) -> Tensor:
        """The Markov head's embeddings W1 of tokens [...], [..., rank]."""
        first, number = self.sizes.tokens.first, len(self.sizes.tokens)
        is_known = self.sizes.tokens.contains(tokens)
        embeds: Tensor = self.before(torch.where(is_known, tokens - first, number))
        return embeds

    def follow(self, ahead: Tensor, depth: int, tokens: Tensor) -> Tensor:
        """Log-probabilities of what follows nodes of a depth, [row, node, token].

        `ahead` [row, place, token] are logits of the block's places.
        """
        after: Tensor = self.markov(self.previous_embeds(tokens))
        return (ahead[:, depth, None] + after.float()).log_softmax(dim=-1)

    def chances(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits of a draft being accepted where all before it are, [...]."""
        logits: Tensor = self.chance(torch.cat((hidden, before), dim=-1)).squeeze(-1)
        return logits


class BlockPasses(CachedPasses):
    """Runs a head over a cache whose memory never moves, with fused kernels where there are any.

    The arithmetic is that of `BlockHead.run`. Row r is slot r; weights must not be replaced.
    """

    def __init__(self, head: BlockHead, cache: KVCache, kernels: "FusedKernels | None") -> None:
        super().__init__(head.sizes.backbone, head.rotary, cache, kernels)
        self._head = head
        self._fuse = product_of(head.fuse, kernels)
        self._layers = [
            (
                layer,
                product_of(layer.attention.qkv, kernels),
                product_of(layer.attention.out, kernels),
                product_of(layer.mlp.gate_up, kernels),
                product_of(layer.mlp.down, kernels),
            )
            for layer in head.backbone
        ]

    def append(self, states: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Append committed `positions` [row, position] of slots [row]."""
        num_rows, num_positions = positions.shape
        fused = self._normed(self._fuse.apply(states.flatten(0, 1)), self._head.fused_norm)
        cos, sin = self._rotation(positions, fused)
        index = (slots[:, None] * self._cache.num_positions + positions).flatten()
        window = CacheWindow(targets=self._cache.flat.unbind(0), index=index)
        for number, (_, qkv, _, _, _) in enumerate(self._layers):
            split = qkv.apply(fused).view(num_rows, num_positions, -1, self._sizes.head_dim)
            keys_values = split[:, :, self._sizes.num_heads :]
            rotate_(keys_values[:, :, : self._sizes.num_kv_heads], cos, sin)
            window.write(number, keys_values)

    def run(self, embeds: Tensor, positions: Tensor, num_cached: Tensor) -> Tensor:
        """Hidden states [row, place, width] of blocks behind `num_cached` [row] positions."""
        num_rows, num_places = positions.shape
        hidden = self._head.block(embeds).flatten(0, 1)
        attention = self._of_blocks(hidden, positions, num_cached)
        for number, (layer, qkv, out, gate_up, down) in enumerate(self._layers):
            normed = self._normed(hidden, layer.attention_norm)
            mixed = attention.mix(number, qkv.apply(normed))
            hidden = added(hidden, out.add_to(hidden, mixed))
            opened = self._opened(gate_up.apply(self._normed(hidden, layer.mlp_norm)))
            hidden = added(hidden, down.add_to(hidden, opened))
        return self._normed(hidden, self._head.norm).view(num_rows, num_places, -1)

    def _of_blocks(self, like: Tensor, positions: Tensor, num_cached: Tensor) -> Attention:
        """Of blocks that lie behind what is cached, and see that and themselves."""
        num_places = positions.shape[1]
        cache_positions = num_cached[:, None] + torch.arange(num_places, device=like.device)
        every = torch.arange(self._cache.num_positions, device=like.device)
        seen = (every < (num_cached + num_places)[:, None])[:, None, None]
        return self.attention(like, positions, cache_positions, seen.expand(-1, -1, num_places, -1))


def block_sizes(
    target: LlamaSizes,
    tokens: TokenRange,
    read_layers: Sequence[int] = (),
    places: int = 7,
    num_layers: int = 1,
    mlp_width: int = 0,
    rank: int = 0,
) -> BlockSizes:
    """A head for a target; what is 0 or not given is as the target has it, or as is published."""
    backbone = LlamaSizes(
        0,
        target.width,
        mlp_width or target.mlp_width,
        num_layers,
        target.num_heads,
        target.num_kv_heads,
        target.head_dim,
        norm_eps=target.norm_eps,
        rope_theta=target.rope_theta,
        max_positions=max(target.max_positions, 4096),
        has_qkv_bias=False,
        gate=target.gate,
    )
    rank = rank or min(256, target.width // 2)
    return BlockSizes(backbone, tuple(read_layers), places, tokens, rank)
