"""The Triton programs themselves: each does in one launch what PyTorch does in several.

Arithmetic is in float32, rounded where the plain operations round a result that others read. They
know pointers and strides only; `launch` knows tensors.
"""

# Pointers and sizes have no types of their own here: Triton gives them some when it compiles.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def rms_norm(hidden, weight, out, width, eps, BLOCK: tl.constexpr):
    """Normalise one token per program; the weight multiplies after the cast back."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    wide = tl.load(hidden + token * width + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    narrow = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = (narrow * factor).to(out.dtype.element_ty)
    tl.store(out + token * width + columns, normed, mask=inside)


@triton.jit
def add_layer_norm(
    residual, branch, scale, weight, bias, total, out, width, eps,
    HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a branch, scaled per channel, to one token's residual, and normalise the sum."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    here = token * width + columns
    added = tl.load(branch + here, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        added = added * tl.load(scale + columns, mask=inside, other=0.0).to(tl.float32)
    wide = tl.load(residual + here, mask=inside, other=0.0).to(tl.float32) + added
    tl.store(total + here, wide.to(total.dtype.element_ty), mask=inside)
    wide = wide.to(total.dtype.element_ty).to(tl.float32)
    mean = tl.sum(wide, axis=0) / width
    centred = tl.where(inside, wide - mean, 0.0)
    spread = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    normed = centred * spread * factor + offset
    tl.store(out + here, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_times(gate_up, out, width, BLOCK: tl.constexpr):
    """silu(gate) * up, a block of one token's columns per program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + token * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    behind = gate_up + token * 2 * width + width
    up = tl.load(behind + columns, mask=inside, other=0.0).to(tl.float32)
    opened = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * width + columns, (opened * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_append(
    fused, cos, sin, cache, slots, rotation_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate one head of one token. Queries stay in place, keys and values go to the cache."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    columns = tl.arange(0, BLOCK)
    inside = columns < HEAD_DIM
    other_half = tl.where(columns < half, columns + half, columns - half)
    source = fused + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    own = tl.load(source + columns, mask=inside, other=0.0)
    if head < NUM_HEADS + NUM_KV_HEADS:
        turned = tl.load(source + other_half, mask=inside, other=0.0).to(tl.float32)
        angle = token * rotation_stride + columns
        along = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        across = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        rotated = own.to(tl.float32) * along + turned * across
        own = rotated.to(fused.dtype.element_ty)
    if head < NUM_HEADS:
        # Both halves were read by this program alone: wait for all of its threads to have done so.
        tl.debug_barrier()
        tl.store(source + columns, own, mask=inside)
    else:
        slot = tl.load(slots + token)
        kept = cache + (slot * 2 * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM
        tl.store(kept + columns, own, mask=inside)


@triton.jit(do_not_specialize=["num_nodes", "read", "row_length", "mask_stride"])
def attend_split(
    fused, cache, mask, partial, summary, num_nodes, read, row_length, mask_stride, scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr, QUERIES: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One share of a row's slots, seen by all of its queries that read the same key head.

    Leaves weighted values in `partial` [split, row, node, head, head_dim] and their greatest score
    and sum of weights in `summary` [split, row, node, head, 2], for `join_splits`.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    query = tl.arange(0, QUERIES)
    node = query // group
    head = kv_head * group + query % group
    is_query = node < num_nodes
    columns = tl.arange(0, BLOCK)
    inside = columns < HEAD_DIM
    token = row * num_nodes + node
    place = (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    both = is_query[:, None] & inside[None, :]
    queries = tl.load(fused + place[:, None] + columns[None, :], mask=both, other=0.0)
    greatest = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, BLOCK), tl.float32)
    share = tl.cdiv(tl.cdiv(read, NUM_SPLITS), SLOTS) * SLOTS
    start = split * share
    for first in range(start, tl.minimum(start + share, read), SLOTS):
        slot = first + tl.arange(0, SLOTS)
        is_slot = slot < read
        where = ((row * row_length + slot) * 2 * NUM_KV_HEADS + kv_head) * HEAD_DIM
        there = is_slot[:, None] & inside[None, :]
        keys = tl.load(cache + where[:, None] + columns[None, :], mask=there, other=0.0)
        seen = is_query[:, None] & is_slot[None, :]
        added = tl.load(
            mask + token[:, None] * mask_stride + slot[None, :], mask=seen, other=float("-inf")
        )
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores += added.to(tl.float32)
        higher = tl.maximum(greatest, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(greatest - higher)
        greatest = higher
        total = total * shrink + tl.sum(weights, axis=1)
        behind = where[:, None] + NUM_KV_HEADS * HEAD_DIM + columns[None, :]
        values = tl.load(cache + behind, mask=there, other=0.0)
        narrow = weights.to(values.dtype)
        mixed = mixed * shrink[:, None] + tl.dot(narrow, values, input_precision="ieee")
    entry = (split * tl.num_programs(0) * num_nodes + token) * NUM_HEADS + head
    tl.store(partial + entry[:, None] * HEAD_DIM + columns[None, :], mixed, mask=both)
    tl.store(summary + entry * 2, greatest, mask=is_query)
    tl.store(summary + entry * 2 + 1, total, mask=is_query)


@triton.jit(do_not_specialize=["num_entries"])
def join_splits(
    partial, summary, out, num_entries,
    HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Join the shares of one query head, the program's entry of [row, node, head]."""
    entry = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HEAD_DIM
    greatest = tl.load(summary + entry * 2)
    for split in range(1, NUM_SPLITS):
        there = tl.load(summary + (split * num_entries + entry) * 2)
        greatest = tl.maximum(greatest, there)
    total = 0.0
    mixed = tl.zeros((BLOCK,), tl.float32)
    for split in range(NUM_SPLITS):
        place = split * num_entries + entry
        weight = tl.exp(tl.load(summary + place * 2) - greatest)
        total += weight * tl.load(summary + place * 2 + 1)
        values = tl.load(partial + place * HEAD_DIM + columns, mask=inside, other=0.0)
        mixed += weight * values
    tl.store(
        out + entry * HEAD_DIM + columns, (mixed / total).to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def _store_fp8(out, scales, row, width, wide, columns, inside):
    """Write one row in fp8, and what to multiply it by."""
    scale = tl.maximum(tl.max(tl.abs(wide), axis=0), 1e-12) / 448.0
    tl.store(scales + row, scale)
    tl.store(out + row * width + columns, (wide / scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def quantise_rows(rows, out, scales, width, BLOCK: tl.constexpr):
    """Write one row per program in fp8."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    wide = tl.load(rows + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    _store_fp8(out, scales, row, width, wide, columns, inside)


@triton.jit
def rms_norm_fp8(
    hidden, branch, weight, out, scales, width, eps,
    HAS_BRANCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`rms_norm`, in fp8; a branch is added to the token before, in place."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    here = token * width + columns
    wide = tl.load(hidden + here, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        wide += tl.load(branch + here, mask=inside, other=0.0).to(tl.float32)
        total = wide.to(hidden.dtype.element_ty)
        tl.store(hidden + here, total, mask=inside)
        wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    narrow = (wide * scale).to(hidden.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = (narrow * factor).to(hidden.dtype.element_ty).to(tl.float32)
    _store_fp8(out, scales, token, width, normed, columns, inside)


@triton.jit
def silu_times_fp8(gate_up, out, scales, width, BLOCK: tl.constexpr):
    """`silu_times` of one token per program, in fp8."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + token * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    behind = gate_up + token * 2 * width + width
    up = tl.load(behind + columns, mask=inside, other=0.0).to(tl.float32)
    opened = (gate * tl.sigmoid(gate)).to(gate_up.dtype.element_ty).to(tl.float32)
    product = (opened * up).to(gate_up.dtype.element_ty).to(tl.float32)
    _store_fp8(out, scales, token, width, product, columns, inside)
