"""A CPU's pass: the tokens of all rows side by side, without padding, and attention row by row.

A token costs on a CPU what it costs, so nothing is padded: products run over all tokens at once,
and every row attends to just the positions that it has. Rows that lie side by side in the cache and
have the same numbers share one call of the attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from deft_policies.model.cpu_products import Rows
from deft_policies.model.kv_cache import CacheWindow, KVCache
from deft_policies.model.llama import added_mask, rotate_
from deft_policies.model.sizes import LlamaSizes
from deft_policies.model.staging import to_device


@dataclass(frozen=True)
class PackedRow:
    """What one row brings to a pass: tokens that are appended from position `start` on."""

    slot: int
    start: int
    num_tokens: int
    # bool [token, position], what each token sees; None: everything up to itself.
    mask: NDArray[np.bool_] | None = None
    wanted: tuple[int, ...] | None = None  # tokens whose output is wanted; None: all


@dataclass(frozen=True)
class _Group:
    """Rows side by side in the cache that begin at the same position and are as long."""

    tokens: slice  # of the pass
    num_rows: int
    window: CacheWindow
    mask: Tensor | None  # [row, 1, token, position], added to the scores
    is_causal: bool
    wanted: Tensor | None = None  # [kept], tokens of each row


@dataclass(frozen=True)
class PackedAttention:
    """The attention of one pass, shared by its layers."""

    sizes: LlamaSizes
    cos: Tensor  # [1, token, 1, head_dim]
    sin: Tensor
    groups: Sequence[_Group]
    sums_in: torch.dtype  # of the attention
    rows: Rows | None  # how products want rows; None: as they come
    kept: Tensor | None = None  # [kept], tokens of the pass whose output is wanted

    @property
    def num_out(self) -> int:
        """Tokens whose output is wanted."""
        return int(self.cos.shape[1]) if self.kept is None else len(self.kept)

    def mix(self, layer: int, fused: Tensor) -> Tensor:
        """Mixed values [token out, inner]; padded as products want it."""
        sizes, num_tokens = self.sizes, self.cos.shape[1]
        num_heads, inner = sizes.num_heads, sizes.num_heads * sizes.head_dim
        split = fused[:num_tokens].view(1, num_tokens, -1, sizes.head_dim)
        rotate_(split[:, :, : num_heads + sizes.num_kv_heads], self.cos, self.sin)
        sums_in, parts = self.sums_in, []
        for group in self.groups:
            its_tokens = split if len(self.groups) == 1 else split[0, group.tokens]
            here = its_tokens.view(group.num_rows, -1, *split.shape[2:])
            group.window.write(layer, here[:, :, num_heads:])
            keys, values = group.window.seen(layer)
            queries = here[:, :, :num_heads]
            if group.wanted is not None:
                queries = queries.index_select(1, group.wanted)
            attended = functional.scaled_dot_product_attention(
                queries.transpose(1, 2).to(sums_in),
                keys.to(sums_in),
                values.to(sums_in),
                attn_mask=group.mask,
                is_causal=group.is_causal,
                enable_gqa=sizes.num_kv_heads != num_heads,
            )
            parts.append(attended.transpose(1, 2).reshape(-1, inner))
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return mixed if self.rows is None else self.rows.pad(mixed.to(fused.dtype))

    def keep(self, hidden: Tensor) -> Tensor:
        """Of [token, width] the tokens whose output is wanted."""
        return hidden if self.kept is None else hidden.index_select(0, self.kept)

    def of_wanted(self, rows: Sequence[PackedRow]) -> "PackedAttention":
        """That of a layer which computes the wanted tokens alone."""
        groups, kept, first = [], list[int](), 0
        by_start = {group.tokens.start: group for group in self.groups}
        group = self.groups[0]
        for row in rows:
            tokens = range(row.num_tokens) if row.wanted is None else row.wanted
            kept += [first + token for token in tokens]
            if first in by_start:
                group = by_start[first]
                groups.append(group if row.wanted is None else _narrowed(group, row, self.sums_in))
            first += row.num_tokens
        return replace(self, groups=groups, kept=to_device(kept, self.cos.device))


def _narrowed(group: _Group, row: PackedRow, sums_in: torch.dtype) -> _Group:
    """The group with the wanted tokens of each row alone, which are those of its first row."""
    assert row.wanted is not None
    device = group.window.targets[0].device
    wanted, mask = to_device(row.wanted, device), group.mask
    if group.is_causal:  # fewer queries than positions are not causal by shape any more
        seen = torch.arange(row.num_tokens, device=device) <= wanted[:, None]
        mask = added_mask(seen[None, None], sums_in)
    elif mask is not None:
        mask = mask[:, :, wanted]
    return replace(group, wanted=wanted, mask=mask, is_causal=False)


def attend_packed(
    cache: KVCache,
    rows: Sequence[PackedRow],
    rotation: tuple[Tensor, Tensor],
    sizes: LlamaSizes,
    product_rows: Rows | None,
    dtype: torch.dtype,
) -> tuple[PackedAttention, PackedAttention | None]:
    """The attention of a pass and that of its last layer, None where that is the same."""
    sums_in = dtype if product_rows is None else torch.float64
    groups, first = [], 0
    for group in _alike(rows):
        row, num_rows = group[0], len(group)
        num_tokens, slots = row.num_tokens * num_rows, slice(row.slot, row.slot + num_rows)
        mask, is_causal = _mask_of(group, sums_in, cache.data.device)
        window = cache.open_same(slots, row.start, row.num_tokens)
        tokens = slice(first, first + num_tokens)
        groups.append(_Group(tokens, num_rows, window, mask, is_causal))
        first += num_tokens
    attention = PackedAttention(sizes, *rotation, groups, sums_in, product_rows)
    if all(row.wanted is None for row in rows):
        return attention, None
    return attention, attention.of_wanted(rows)


def _alike(rows: Sequence[PackedRow]) -> list[list[PackedRow]]:
    """Rows in order, those together that one call of the attention can serve."""
    groups: list[list[PackedRow]] = []
    for row in rows:
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and row.slot == last.slot + 1
            and (row.start, row.num_tokens, row.wanted)
            == (last.start, last.num_tokens, last.wanted)
            and (row.mask is None) == (last.mask is None)
        ):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _mask_of(
    rows: Sequence[PackedRow], sums_in: torch.dtype, device: torch.device
) -> tuple[Tensor | None, bool]:
    """What is added to the scores of a group, and whether its shape alone is causal."""
    row = rows[0]
    if row.mask is not None:
        masks = np.stack([row.mask for row in rows if row.mask is not None])
        return added_mask(to_device(masks, device).unsqueeze(1), sums_in), False
    if row.num_tokens == 1 or row.start == 0:
        return None, row.num_tokens > 1
    size = row.num_tokens, row.start + row.num_tokens
    seen = torch.ones(size, dtype=torch.bool, device=device)
    return added_mask(seen.tril_(row.start)[None, None], sums_in), False
