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


@triton.jit
def _load_slots(pointer, row, row_length, slot, end, head, columns, inside, NUM_KV_HEADS, HEAD_DIM):
    """Keys, or values, of one head: [slot, head_dim], zeros from `end` on."""
    where = ((row * row_length + slot) * 2 * NUM_KV_HEADS + head) * HEAD_DIM
    there = (slot < end)[:, None] & inside[None, :]
    return tl.load(pointer + where[:, None] + columns[None, :], mask=there, other=0.0)


@triton.jit
def _scores(queries, keys, mask, slot, end, is_query, token, mask_stride, scale):
    """How much queries [query, head_dim] look at keys [slot, head_dim]."""
    seen = is_query[:, None] & (slot < end)[None, :]
    added = tl.load(
        mask + token[:, None] * mask_stride + slot[None, :], mask=seen, other=float("-inf")
    )
    return tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale + added


@triton.jit(do_not_specialize=["num_nodes", "row_length", "mask_stride"])
def attend_split(
    fused, cache, mask, ends, partial, totals, num_nodes, row_length, mask_stride, scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr, QUERIES: tl.constexpr, SCORES: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One share of a row's slots, seen by some of its queries that read the same key head.

    Leaves weighted values in `partial` [split, row, node, head, head_dim] and the sum of weights in
    `totals` [split, row, node, head], for `join_splits`. The greatest score is that of all slots,
    and sums are in float64, so that it does not matter in which order they were added.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    split = tl.program_id(2)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    query = tl.program_id(1) // NUM_KV_HEADS * QUERIES + tl.arange(0, QUERIES)
    node = query // group
    head = kv_head * group + query % group
    is_query = node < num_nodes
    columns = tl.arange(0, BLOCK)
    inside = columns < HEAD_DIM
    token = row * num_nodes + node
    place = (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    both = is_query[:, None] & inside[None, :]
    queries = tl.load(fused + place[:, None] + columns[None, :], mask=both, other=0.0)
    end = tl.max(tl.load(ends + token, mask=is_query, other=0), axis=0)
    greatest = tl.full((QUERIES,), -1e30, tl.float32)
    for first in range(0, end, SCORES):
        slot = first + tl.arange(0, SCORES)
        keys = _load_slots(
            cache, row, row_length, slot, end, kv_head, columns, inside, NUM_KV_HEADS, HEAD_DIM
        )
        scores = _scores(queries, keys, mask, slot, end, is_query, token, mask_stride, scale)
        greatest = tl.maximum(greatest, tl.max(scores, axis=1))
    total = tl.zeros((QUERIES,), tl.float64)
    mixed = tl.zeros((QUERIES, BLOCK), tl.float64)
    share = tl.cdiv(tl.cdiv(end, NUM_SPLITS), SLOTS) * SLOTS
    start = split * share
    for first in range(start, tl.minimum(start + share, end), SLOTS):
        slot = first + tl.arange(0, SLOTS)
        keys = _load_slots(
            cache, row, row_length, slot, end, kv_head, columns, inside, NUM_KV_HEADS, HEAD_DIM
        )
        scores = _scores(queries, keys, mask, slot, end, is_query, token, mask_stride, scale)
        weights = tl.exp(scores - greatest[:, None])
        total += tl.sum(weights.to(tl.float64), axis=1)
        behind = cache + NUM_KV_HEADS * HEAD_DIM
        values = _load_slots(
            behind, row, row_length, slot, end, kv_head, columns, inside, NUM_KV_HEADS, HEAD_DIM
        )
        # A sum over one number hides from the compiler that these were 16 bits wide: it would then
        # choose a product of matrices that it has not in float64.
        narrow = tl.sum(weights.to(values.dtype).to(tl.float32)[:, :, None], axis=2)
        wide = tl.sum(values.to(tl.float32)[:, :, None], axis=2)
        mixed += tl.dot(narrow.to(tl.float64), wide.to(tl.float64), out_dtype=tl.float64)
    entry = (split * tl.num_programs(0) * num_nodes + token) * NUM_HEADS + head
    tl.store(partial + entry[:, None] * HEAD_DIM + columns[None, :], mixed, mask=both)
    tl.store(totals + entry, total, mask=is_query)


@triton.jit(do_not_specialize=["num_entries"])
def join_splits(
    partial, totals, out, num_entries,
    HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Join the shares of one query head, the program's entry of [row, node, head]."""
    entry = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HEAD_DIM
    total = tl.load(totals + entry)
    mixed = tl.load(partial + entry * HEAD_DIM + columns, mask=inside, other=0.0)
    for split in range(1, NUM_SPLITS):
        place = split * num_entries + entry
        total += tl.load(totals + place)
        mixed += tl.load(partial + place * HEAD_DIM + columns, mask=inside, other=0.0)
    joined = (mixed / total).to(tl.float32)
    tl.store(out + entry * HEAD_DIM + columns, joined.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def product(
    rows, weight, bias, residual, out, num_rows, num_in, num_out,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One tile of rows [row, in] times weight [out, in], plus a bias, plus what is there already.

    Every number is summed along `in` by one program from the first to the last, whatever the tiles:
    a row has the bits that it has alone.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inner = tl.arange(0, INNER)
    is_row, is_column = row < num_rows, column < num_out
    left = rows + row[:, None] * num_in + inner[None, :]
    right = weight + column[None, :] * num_in + inner[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, num_in, INNER):
        if IS_WHOLE:
            some = tl.load(left, mask=is_row[:, None], other=0.0)
            others = tl.load(right, mask=is_column[None, :], other=0.0)
        else:
            is_inner = first + inner < num_in
            some = tl.load(left, mask=is_row[:, None] & is_inner[None, :], other=0.0)
            others = tl.load(right, mask=is_column[None, :] & is_inner[:, None], other=0.0)
        total = tl.dot(some, others, total, input_precision="ieee")
        left += INNER
        right += INNER
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    here = row[:, None] * num_out + column[None, :]
    both = is_row[:, None] & is_column[None, :]
    if HAS_RESIDUAL:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(residual + here, mask=both, other=0.0).to(tl.float32)
    tl.store(out + here, total.to(out.dtype.element_ty), mask=both)


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
