"""Passes in which a token gets the same bits alone as among others, in bfloat16 on a CPU.

A product or an attention may be computed by another routine, or sum in another order, for one row
than for several: then a token that is checked among drafts is not quite the token that plain
decoding computes, and answers differ. Three rules prevent that:

- No product and no attention sees a number of rows that is not a multiple of four.
- The slots that attention reads are a multiple of 64; what a token must not see is masked.
- A token whose own slots have gaps, as on the second branch of a tree, attends to a copy of them
  without gaps, as plain decoding would have them.

Whether that is enough depends on the processor and on torch, so the tests ask each machine.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.model.kv_cache import CacheWindow
from deft_policies.model.llama import Attention, added_mask, take_rows

ROWS = 4
_SLOTS = 64


def rounded_slots(read: int) -> int:
    """How many slots a pass reads so that it may read so many."""
    return read + -read % _SLOTS


def in_fours(num_rows: int, device: torch.device) -> Tensor:
    """Indices of so many rows, the last one repeated up to a multiple of four."""
    every = torch.arange(num_rows + -num_rows % ROWS, device=device)
    return every.clamp_(max=num_rows - 1)


@dataclass(frozen=True)
class _Gaps:
    """The tokens whose slots have gaps, and where they find their slots in order."""

    rows: Tensor  # [gap], in the batch
    tokens: Tensor  # [gap], in the row
    slots: Tensor  # [gap, slot]: those it sees come first
    mask: Tensor  # [gap, 1, query, slot], added to the scores

    @staticmethod
    def find(seen: Tensor, dtype: torch.dtype) -> "_Gaps | None":
        """Those of [row, token, slot] that see a slot behind one that they do not see."""
        counts = seen.sum(dim=2, keepdim=True)
        without_gaps = torch.arange(seen.shape[2], device=seen.device) < counts
        rows, tokens = (seen != without_gaps).any(dim=2).nonzero(as_tuple=True)
        if len(rows) == 0:
            return None
        counts = counts[rows, tokens]
        read = rounded_slots(int(counts.max()))
        order = seen[rows, tokens].to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        allowed = torch.arange(read, device=seen.device) < counts
        mask = added_mask(allowed[:, None, None].expand(-1, -1, ROWS, -1), dtype)
        return _Gaps(rows, tokens, order[:, :read], mask)


@dataclass(frozen=True)
class BatchInvariantAttention(Attention):
    """Attention by the rules above. Its tokens come in fours."""

    seen: Tensor | None = None  # [row, token, slot] bool
    gaps: _Gaps | None = None

    @staticmethod
    def over(shared: Attention, seen: Tensor) -> "BatchInvariantAttention":
        """That of tokens which see these slots, [row, token, slot]."""
        dtype = shared.rotation.cos.dtype
        return BatchInvariantAttention(
            shared.sizes,
            shared.rotation,
            added_mask(seen.unsqueeze(1), dtype),
            window=shared.window,
            kept=shared.kept,
            seen=seen,
            gaps=_Gaps.find(seen, dtype),
        )

    def of_rows_out(self, rows_out: Tensor) -> Attention:
        """That of a layer which computes the tokens [row, kept] only."""
        assert self.seen is not None
        kept = super().of_rows_out(rows_out)
        return BatchInvariantAttention.over(kept, take_rows(self.seen, rows_out))

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As `Attention` does, then again for the tokens with gaps."""
        mixed = super().attend(layer, queries, keys, values)
        gaps = self.gaps
        if gaps is None:
            return mixed
        assert self.window is not None
        num_kv_heads = self.sizes.num_kv_heads
        found = self.window.layers[layer][gaps.rows[:, None], gaps.slots].transpose(1, 2)
        # Repeated, not expanded: rows that lie at one address are summed in another order.
        asked = queries[gaps.rows, gaps.tokens].unsqueeze(1).repeat(1, ROWS, 1, 1)
        again = functional.scaled_dot_product_attention(
            asked.transpose(1, 2),
            found[:, :num_kv_heads],
            found[:, num_kv_heads:],
            attn_mask=gaps.mask,
            enable_gqa=num_kv_heads != self.sizes.num_heads,
        )
        mixed[gaps.rows, :, gaps.tokens] = again[:, :, 0]
        return mixed


def what_tokens_see(positions: Tensor, mask: Tensor | None, window: CacheWindow) -> Tensor:
    """[row, token, slot] of a pass, where a mask [row, 1, token or 1, slot] may say it.

    Without one, a token sees the slots up to its position.
    """
    num_slots = window.keys[0].shape[2]
    if mask is None:
        slots = torch.arange(num_slots, device=positions.device)
        return slots <= positions[:, :, None]
    seen = mask.expand(len(positions), 1, positions.shape[1], -1).squeeze(1)
    return functional.pad(seen, (0, num_slots - seen.shape[2]))
