"""The Triton programs themselves: each does in one launch what PyTorch does in several.

Arithmetic is in float32, rounded where the plain operations round a result that others read. They
know pointers and strides only; `launch` knows tensors.
"""

# Pointers and sizes have no types of their own here: Triton gives them some when it compiles.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from deft_policies.model import fused_attention, quantization

_ROOT = tl.constexpr(fused_attention.ROOT)
_NUM_PROMPT = tl.constexpr(fused_attention.NUM_PROMPT)
_SLOT = tl.constexpr(fused_attention.SLOT)
_TWO_WAY = tl.constexpr(fused_attention.TWO_WAY)
_NUM_HEADER = tl.constexpr(fused_attention.NUM_HEADER)
_MOST_DEEP = tl.constexpr(fused_attention.MOST_DEEP)
_WORD = tl.constexpr(fused_attention.WORD)
_GROUP = tl.constexpr(quantization.GROUP)
_BORDERS = tl.constexpr(16)  # that borders behind a prompt are multiples of
_AT_ONCE = tl.constexpr(4)  # parts that are read at once
_ROOT_OF_HALF = tl.constexpr(0.5**0.5)
# y of GELU by tanh, twice: x times so much, and x ** 3 times so much.
_GELU_LINEAR = tl.constexpr(1.5957691216057308)
_GELU_CUBIC = tl.constexpr(0.07135481627260025)
_LOWEST = tl.constexpr(-900.0)  # of the exponents of weights, so that none overflows


@triton.jit
def rms_norm(hidden, weight, out, width, eps, BLOCK: tl.constexpr):
    """Normalise one token per program; the weight multiplies after the cast back."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wide = tl.load(hidden + token * width + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    narrow = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
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
def _opened(gate, up, kind: tl.constexpr, IS_GELU: tl.constexpr):
    """silu(gate) * up, or gelu(gate) * up, of numbers in float32 that were rounded before.

    GELU by tanh, 0.5 * x * (1 + tanh(y)), is x * sigmoid(2 * y).
    """
    inside = gate
    if IS_GELU:
        inside = gate * tl.fma(gate * gate, _GELU_CUBIC, _GELU_LINEAR)
    return ((gate * tl.sigmoid(inside)).to(kind).to(tl.float32) * up).to(kind)


@triton.jit
def gate_times_up(gate_up, out, width, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    """gate(gate) * up, a block of one token's columns per program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + token * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    behind = gate_up + token * 2 * width + width
    up = tl.load(behind + columns, mask=inside, other=0.0).to(tl.float32)
    found = _opened(gate, up, out.dtype.element_ty, IS_GELU)
    tl.store(out + token * width + columns, found, mask=inside)


@triton.jit
def _turned(own, other, along, across, kind: tl.constexpr):
    """A rotated number; with one rounding fewer than two products, wherever it is computed."""
    return tl.fma(own.to(tl.float32), along, other.to(tl.float32) * across).to(kind)


@triton.jit
def rotate_append(
    fused, cos, sin, cache, slots, rotation_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of one token. Queries stay in place, keys and values go to the cache."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half: tl.constexpr = HEAD_DIM // 2
    columns = tl.arange(0, HALF)
    inside = (columns < half)[None, :] & (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None]
    every: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    source = fused + (token * every + head[:, None]) * HEAD_DIM + columns[None, :]
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + half, mask=inside, other=0.0)
    angle, is_half = token * rotation_stride + columns, columns < half
    cos_first = tl.load(cos + angle, mask=is_half, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin + angle, mask=is_half, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos + angle + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin + angle + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
    kind: tl.constexpr = fused.dtype.element_ty
    is_turned = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    lower = tl.where(is_turned, _turned(first, second, cos_first, sin_first, kind), first)
    upper = tl.where(is_turned, _turned(second, first, cos_second, sin_second, kind), second)
    is_query = (head < NUM_HEADS)[:, None]
    tl.store(source, lower, mask=inside & is_query)
    tl.store(source + half, upper, mask=inside & is_query)
    slot = tl.load(slots + token)
    kept = cache + (slot * 2 * NUM_KV_HEADS + head[:, None] - NUM_HEADS) * HEAD_DIM
    kept += columns[None, :]
    tl.store(kept, lower, mask=inside & (head >= NUM_HEADS)[:, None])
    tl.store(kept + half, upper, mask=inside & (head >= NUM_HEADS)[:, None])


@triton.jit
def _power(exponent):
    """2 ** exponent, exactly, of whole numbers in float32; 0 where float32 does not reach."""
    bits = (tl.minimum(tl.maximum(exponent, -127.0), 127.0).to(tl.int32) + 127) << 23
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _wide(narrow):
    """The same [row, column] in float64.

    A sum over one number hides from the compiler that these were 16 bits wide: it would then choose
    a product of matrices that it has not in float64.
    """
    return tl.sum(narrow.to(tl.float32)[:, :, None], axis=2).to(tl.float64)


@triton.jit
def _are_ancestors(words, behind, WORDS: tl.constexpr):
    """Whether slots lie before the root, or hold ancestors: [query, slot], of `behind` the root."""
    inside = tl.minimum(tl.maximum(behind, 0), WORDS * _WORD - 1)
    word = tl.load(words[:, None] + inside // _WORD)
    is_ancestor = ((word >> (inside % _WORD)) & 1) == 1
    return (behind < 0) | ((behind < WORDS * _WORD) & is_ancestor)


@triton.jit(do_not_specialize=["num_tokens", "width", "row_length", "row_size"])
def attend(
    fused, cache, numbers, partial, totals, tops, counts, out,
    num_tokens, width, row_length, row_size, scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WORDS: tl.constexpr, IS_PREFILL: tl.constexpr, NUM_SPLITS: tl.constexpr,
    QUERIES: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mix values for some queries of one row that read the same key head.

    Which slots a token sees follows from the `numbers` of its row: a node sees all that lies before
    the root, and its ancestors; a token of the prompt sees what comes before it.

    A token has the same bits whatever else is in the pass, and wherever its ancestors lie. Slots
    before its border hold the same tokens whenever it is computed: they are read in chunks, each
    relative to a power of two of its own. Those from the border on are summed in float64, so that
    their order means nothing, and come last. These parts are added in order, whichever block
    computes them: with splits, the last program to end.
    """
    row = tl.program_id(0)
    # Blocks of queries with more before them come first: they take longest.
    block = (tl.num_programs(1) - 1 - tl.program_id(1)) // NUM_KV_HEADS
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    split = tl.program_id(2)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    every: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    query = block * QUERIES + tl.arange(0, QUERIES)
    number = query // group  # of the token in its row
    head = kv_head * group + query % group
    is_query = number < num_tokens
    columns = tl.arange(0, BLOCK)
    inside = columns < HEAD_DIM
    token = row * num_tokens + number
    both = is_query[:, None] & inside[None, :]
    header = numbers + row * row_size
    root = tl.load(header + _ROOT).to(tl.int32)
    num_prompt = tl.load(header + _NUM_PROMPT).to(tl.int32)
    two_way = tl.load(header + _TWO_WAY).to(tl.int32)
    strip = cache + tl.load(header + _SLOT) * row_length * (2 * NUM_KV_HEADS * HEAD_DIM)
    place = number if IS_PREFILL else root + number
    node = tl.minimum(tl.maximum(place - root, 0), width - 1)
    is_node = (place >= root) & (place - root < width)
    depth = tl.load(header + _NUM_HEADER + width + node).to(tl.int32)
    source = (token.to(tl.int64) * every + head) * HEAD_DIM
    queries = tl.load(fused + source[:, None] + columns[None, :], mask=both, other=0.0)
    # All slots before `open` are seen, and none from `end` on. Without a prompt `open` is not read.
    is_query = is_query & (num_prompt > 0)
    in_front = place < two_way
    open = tl.where(is_node, root + 1, tl.where(in_front, two_way, place + 1))
    end = tl.where(is_query, tl.where(is_node, root + width, open), 0)
    position = tl.where(is_node, root + depth, place)
    border = num_prompt // _BORDERS * _BORDERS
    border = tl.maximum(border, (position - _MOST_DEEP) // CHUNK * CHUNK)
    reach = tl.where(is_query, tl.minimum(border, open), 0)
    last_chunk, last_slot = tl.max(reach, axis=0), tl.max(end, axis=0)
    first_slot = tl.min(tl.where(is_query, border, last_slot), axis=0)

    keys_of = strip + kv_head * HEAD_DIM
    values_of = keys_of + NUM_KV_HEADS * HEAD_DIM
    entry = token * NUM_HEADS + head
    num_entries = tl.num_programs(0) * num_tokens * NUM_HEADS
    num_chunks = tl.cdiv(last_chunk, CHUNK)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, BLOCK), tl.float32)
    top = tl.full((QUERIES,), _LOWEST, tl.float32)
    for chunk in range(split, num_chunks, NUM_SPLITS):
        slot = chunk * CHUNK + tl.arange(0, CHUNK)
        there = (slot < last_chunk)[:, None] & inside[None, :]
        here = slot[:, None] * (2 * NUM_KV_HEADS * HEAD_DIM) + columns[None, :]
        keys = tl.load(keys_of + here, mask=there, other=0.0)
        values = tl.load(values_of + here, mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(slot[None, :] < reach[:, None], scores, float("-inf"))
        own = tl.ceil(tl.maximum(tl.max(scores, axis=1), _LOWEST))
        weights = tl.exp2(scores - own[:, None]).to(values.dtype)
        own_mixed = tl.dot(weights, values, input_precision="ieee")
        own_total = tl.sum(weights.to(tl.float32).to(tl.float64), axis=1).to(tl.float32)
        if NUM_SPLITS == 1:
            total, mixed, top = _join(total, mixed, top, own_total, own_mixed, own)
        else:
            _store_part(
                partial, totals, tops, chunk * num_entries + entry, columns, both, is_query,
                own_total, own_mixed, own, HEAD_DIM,
            )  # fmt: skip
    if num_chunks % NUM_SPLITS == split:
        last_total = tl.zeros((QUERIES,), tl.float64)
        last_mixed = tl.zeros((QUERIES, BLOCK), tl.float64)
        last_top = tl.full((QUERIES,), _LOWEST, tl.float32)
        words = header + _NUM_HEADER + 2 * width + node * WORDS
        for first in range(first_slot, last_slot, TAIL):
            slot = first + tl.arange(0, TAIL)
            there = (slot < last_slot)[:, None] & inside[None, :]
            here = slot[:, None] * (2 * NUM_KV_HEADS * HEAD_DIM) + columns[None, :]
            keys = tl.load(keys_of + here, mask=there, other=0.0)
            values = tl.load(values_of + here, mask=there, other=0.0)
            seen = slot[None, :] < open[:, None]
            seen |= is_node[:, None] & _are_ancestors(words, slot[None, :] - root, WORDS)
            seen &= (slot[None, :] >= border[:, None]) & (slot[None, :] < end[:, None])
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            scores = tl.where(seen, scores, float("-inf"))
            # Each slot has a power of two of its own, so that no other slot has a say.
            own = tl.ceil(tl.maximum(scores, _LOWEST))
            weights = tl.exp2(scores - own).to(values.dtype)
            higher = tl.maximum(last_top, tl.max(own, axis=1))
            before = _power(last_top - higher).to(tl.float64)
            exact = _wide(weights) * _power(own - higher[:, None]).to(tl.float64)
            last_mixed = last_mixed * before[:, None]
            last_mixed += tl.dot(exact, _wide(values), out_dtype=tl.float64)
            last_total = last_total * before + tl.sum(exact, axis=1)
            last_top = higher
        own_total, own_mixed = last_total.to(tl.float32), last_mixed.to(tl.float32)
        if NUM_SPLITS == 1:
            total, mixed, top = _join(total, mixed, top, own_total, own_mixed, last_top)
        else:
            _store_part(
                partial, totals, tops, num_chunks * num_entries + entry, columns, both, is_query,
                own_total, own_mixed, last_top, HEAD_DIM,
            )  # fmt: skip
    if NUM_SPLITS == 1:
        _store_mixed(out, entry, columns, both, mixed, total, HEAD_DIM)
    else:
        tl.debug_barrier()  # all threads have stored before one says so
        count = counts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        is_last = tl.atomic_add(count, 1, sem="acq_rel") == NUM_SPLITS - 1
        if is_last:
            tl.store(count, 0)
            for begin in range(0, num_chunks + 1, _AT_ONCE):
                for step in tl.static_range(_AT_ONCE):
                    mine = (begin + step) * num_entries + entry
                    is_part = is_query & (begin + step <= num_chunks)
                    own = tl.load(tops + mine, mask=is_part, other=_LOWEST, cache_modifier=".cg")
                    own_total = tl.load(
                        totals + mine, mask=is_part, other=0.0, cache_modifier=".cg"
                    )
                    place_of = mine[:, None] * HEAD_DIM + columns[None, :]
                    own_mixed = tl.load(
                        partial + place_of, mask=is_part[:, None] & inside[None, :], other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
                    total, mixed, top = _join(total, mixed, top, own_total, own_mixed, own)
            _store_mixed(out, entry, columns, both, mixed, total, HEAD_DIM)


@triton.jit
def _join(total, mixed, top, own_total, own_mixed, own):
    """Add a part, which is relative to `own`, to what is relative to `top`."""
    higher = tl.maximum(top, own)
    before, now = _power(top - higher), _power(own - higher)
    # Products by powers of two are exact, so a rounding fewer or more changes nothing.
    total = total * before + own_total * now
    mixed = mixed * before[:, None] + own_mixed * now[:, None]
    return total, mixed, higher


@triton.jit
def _store_part(
    partial, totals, tops, where, columns, both, is_query, total, mixed, top, HEAD_DIM
):  # fmt: skip
    """Leave a part for the program that joins all of them."""
    tl.store(partial + where[:, None] * HEAD_DIM + columns[None, :], mixed, mask=both)
    tl.store(totals + where, total, mask=is_query)
    tl.store(tops + where, top, mask=is_query)


@triton.jit
def _store_mixed(out, entry, columns, both, mixed, total, HEAD_DIM):
    """Weighted values over the sum of weights; zeros where nothing was seen."""
    mean = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    here = entry.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :]
    tl.store(out + here, mean.to(out.dtype.element_ty), mask=both)


@triton.jit
def _load_inner(pointer, is_there, inner, num_in, IS_WHOLE: tl.constexpr):
    """Some of what is summed over; `is_there` and `inner` are [.., 1] and [1, ..], or turned."""
    if IS_WHOLE:
        return tl.load(pointer, mask=is_there, other=0.0)
    return tl.load(pointer, mask=is_there & (inner < num_in), other=0.0)


@triton.jit
def _wide_weights(weights, kind: tl.constexpr, BITS: tl.constexpr):
    """Weights in the format `kind`; those in fp8 become bfloat16 four at a time.

    Their bits are moved to where bfloat16 has sign, exponent and mantissa. A product by 2 ** 120,
    which is exact, makes good for the difference between the two biases of exponents.
    """
    if BITS == 8 and kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, sign, bias, zero;
            mov.b32 bias, 0x7B807B80;
            mov.b32 zero, 0x80008000;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            and.b32 sign, low, 0x80008000;
            shr.u32 low, low, 4;
            lop3.b32 low, low, 0x07f007f0, sign, 0xEA;
            fma.rn.bf16x2 $0, low, bias, zero;
            and.b32 sign, high, 0x80008000;
            shr.u32 high, high, 4;
            lop3.b32 high, high, 0x07f007f0, sign, 0xEA;
            fma.rn.bf16x2 $1, high, bias, zero;
            }
            """,
            "=r,=r,r",
            [weights.to(tl.int8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return weights.to(kind)


@triton.jit
def _scaled(total, scales, column, is_column, BITS: tl.constexpr):
    """Sums over weights in fp8, whose rows have a scale each, a power of two."""
    if BITS == 8:
        total *= tl.load(scales + column, mask=is_column, other=0.0)[None, :]
    return total


@triton.jit
def _two_of_a_byte(both, kind: tl.constexpr):
    """Weights in four bits, from -8 to 7: the lower halves of bytes, and the upper ones.

    As the last bits of a bfloat16 between 128 and 144 they only need 136 less.
    """
    if kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 first, second, one, bias;
            mov.b32 one, 0x3F803F80;
            mov.b32 bias, 0xC308C308;
            prmt.b32 first, $4, 0, 0x4140;
            prmt.b32 second, $4, 0, 0x4342;
            lop3.b32 $0, first, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $1, second, 0x000F000F, 0x43004300, 0xEA;
            shr.u32 first, first, 4;
            shr.u32 second, second, 4;
            lop3.b32 $2, first, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $3, second, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, $0, one, bias;
            fma.rn.bf16x2 $1, $1, one, bias;
            fma.rn.bf16x2 $2, $2, one, bias;
            fma.rn.bf16x2 $3, $3, one, bias;
            }
            """,
            "=r,=r,=r,=r,r",
            [both],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return ((both & 15).to(tl.float32) - 8.0).to(kind), ((both >> 4).to(tl.float32) - 8.0).to(kind)


@triton.jit
def widen(weight, scales, out, num_in, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """A row of a weight in few bits, a block of it per program, in 16: exactly the same numbers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_in
    if BITS == 4:
        pairs, group = tl.cdiv(num_in, 2 * _GROUP), columns // _GROUP
        byte = (row * pairs + group // 2) * _GROUP + columns % _GROUP
        both = tl.load(weight + byte, mask=inside, other=0)
        narrow = (both >> (group % 2 * 4) & 15).to(tl.float32) - 8.0
        scale = tl.load(scales + row * 2 * pairs + group, mask=inside, other=0.0)
    else:
        narrow = tl.load(weight + row * num_in + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
    tl.store(out + row * num_in + columns, (narrow * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_product(total, some, others, WEIGHT_FIRST: tl.constexpr):
    """Add some rows times some weights."""
    if WEIGHT_FIRST:
        total = tl.dot(others, some, total, input_precision="ieee")
    else:
        total = tl.dot(some, others, total, input_precision="ieee")
    return total


@triton.jit
def _sums(
    rows, weight, scales, row, is_row, column, is_column, num_in,
    BITS: tl.constexpr, IS_WHOLE: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Rows times some columns, each number summed from the first to the last.

    With `WEIGHT_FIRST` the weight is the first operand of the matrix instructions: those that read
    shared memory by themselves, instead of waiting for registers, need 64 rows of it.
    """
    inner = tl.arange(0, INNER)
    if WEIGHT_FIRST:
        row, is_row, of_row = row[None, :], is_row[None, :], inner[:, None]
        column, is_column, of_column = column[:, None], is_column[:, None], inner[None, :]
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        row, is_row, of_row = row[:, None], is_row[:, None], inner[None, :]
        column, is_column, of_column = column[None, :], is_column[None, :], inner[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
    left = rows + row * num_in + of_row
    if BITS == 4:
        pairs = tl.cdiv(num_in, 2 * INNER)  # of groups of weights, which share bytes
        right = weight + column * pairs * INNER + of_column
        scale = scales + column * pairs * 2
        for first in range(0, num_in, 2 * INNER):
            both = tl.load(right, mask=is_column, other=0)
            low, high = _two_of_a_byte(both, rows.dtype.element_ty)
            some = _load_inner(left, is_row, first + of_row, num_in, IS_WHOLE)
            factor = tl.load(scale, mask=is_column, other=0.0).to(some.dtype)
            total = _add_product(total, some, low * factor, WEIGHT_FIRST)
            some = _load_inner(left + INNER, is_row, first + INNER + of_row, num_in, IS_WHOLE)
            factor = tl.load(scale + 1, mask=is_column, other=0.0).to(some.dtype)
            total = _add_product(total, some, high * factor, WEIGHT_FIRST)
            left += 2 * INNER
            right += INNER
            scale += 2
    else:
        right = weight + column * num_in + of_column
        for first in range(0, num_in, INNER):
            some = _load_inner(left, is_row, first + of_row, num_in, IS_WHOLE)
            others = _load_inner(right, is_column, first + of_column, num_in, IS_WHOLE)
            others = _wide_weights(others, some.dtype, BITS)
            total = _add_product(total, some, others, WEIGHT_FIRST)
            left += INNER
            right += INNER
    if WEIGHT_FIRST:
        total = tl.trans(total)
    return total


@triton.jit
def _halves(both, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first and the second half of the columns."""
    return tl.split(tl.permute(tl.reshape(both, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit(do_not_specialize=["num_rows"])
def product(
    rows, weight, scales, bias, residual, out, num_rows, num_in, num_out,
    BITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_GELU: tl.constexpr, IS_WHOLE: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One tile of rows [row, in] times weight [out, in], plus a bias, plus what is there already.

    Or with GELU of it, by the error function.

    Every number is summed along `in` by one program from the first to the last, whatever the tiles:
    a row has the bits that it has alone.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    is_row, is_column = row < num_rows, column < num_out
    total = _sums(
        rows, weight, scales, row, is_row, column, is_column, num_in,
        BITS, IS_WHOLE, WEIGHT_FIRST, ROWS, COLUMNS, INNER,
    )  # fmt: skip
    total = _scaled(total, scales, column, is_column, BITS)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    here = row[:, None] * num_out + column[None, :]
    both = is_row[:, None] & is_column[None, :]
    if HAS_GELU:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total = total * 0.5 * (1.0 + tl.erf(total * _ROOT_OF_HALF))
    if HAS_RESIDUAL:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(residual + here, mask=both, other=0.0).to(tl.float32)
    tl.store(out + here, total.to(out.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["num_rows"])
def product_opened(
    rows, weight, scales, out, num_rows, num_in, width,
    IS_GELU: tl.constexpr, BITS: tl.constexpr, IS_WHOLE: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """`product` with gate and up, then `gate_times_up`: bit for bit the same."""
    half: tl.constexpr = COLUMNS // 2
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    within = tl.program_id(1) * half + tl.arange(0, COLUMNS) % half
    is_row, is_column = row < num_rows, within < width
    # Columns of the gate, then those of up that they are multiplied with.
    column = within.to(tl.int64) + tl.arange(0, COLUMNS) // half * width
    total = _sums(
        rows, weight, scales, row, is_row, column, is_column, num_in,
        BITS, IS_WHOLE, WEIGHT_FIRST, ROWS, COLUMNS, INNER,
    )  # fmt: skip
    kind: tl.constexpr = out.dtype.element_ty
    total = _scaled(total, scales, column, is_column, BITS).to(kind).to(tl.float32)
    gate, up = _halves(total, ROWS, COLUMNS)
    column = (tl.program_id(1) * half + tl.arange(0, half)).to(tl.int64)
    both = is_row[:, None] & (column < width)[None, :]
    found = _opened(gate, up, kind, IS_GELU)
    tl.store(out + row[:, None] * width + column[None, :], found, mask=both)


@triton.jit(do_not_specialize=["num_rows"])
def product_rotated(
    rows, weight, scales, bias, cos, sin, fused, cache, slots,
    num_rows, num_in, rotation_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_WHOLE: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """`product` with queries, keys and values, then `rotate_append`: bit for bit the same."""
    half: tl.constexpr = COLUMNS // 2
    half_head: tl.constexpr = HEAD_DIM // 2
    blocks: tl.constexpr = (half_head + half - 1) // half  # of a head
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = (tl.program_id(1) // blocks).to(tl.int64)
    first = tl.program_id(1) % blocks * half
    within = first + tl.arange(0, COLUMNS) % half
    is_row, is_column = row < num_rows, within < half_head
    # Columns of the lower half of a head, then those of the upper half that they turn with.
    column = head * HEAD_DIM + within + tl.arange(0, COLUMNS) // half * half_head
    total = _sums(
        rows, weight, scales, row, is_row, column, is_column, num_in,
        BITS, IS_WHOLE, WEIGHT_FIRST, ROWS, COLUMNS, INNER,
    )  # fmt: skip
    total = _scaled(total, scales, column, is_column, BITS)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    kind: tl.constexpr = fused.dtype.element_ty
    own, other = _halves(total.to(kind).to(tl.float32), ROWS, COLUMNS)
    lower, upper = own.to(kind), other.to(kind)
    within = first + tl.arange(0, half)
    both = is_row[:, None] & (within < half_head)[None, :]
    if head < NUM_HEADS + NUM_KV_HEADS:
        angle = row[:, None] * rotation_stride + within[None, :]
        along = tl.load(cos + angle, mask=both, other=0.0).to(tl.float32)
        across = tl.load(sin + angle, mask=both, other=0.0).to(tl.float32)
        lower = _turned(own, other, along, across, kind)
        along = tl.load(cos + angle + half_head, mask=both, other=0.0).to(tl.float32)
        across = tl.load(sin + angle + half_head, mask=both, other=0.0).to(tl.float32)
        upper = _turned(other, own, along, across, kind)
    if head < NUM_HEADS:
        every: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
        here = fused + (row[:, None] * every + head) * HEAD_DIM + within[None, :]
        tl.store(here, lower, mask=both)
        tl.store(here + half_head, upper, mask=both)
    else:
        slot = tl.load(slots + row, mask=is_row, other=0)
        kept = cache + (slot[:, None] * 2 * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM
        kept += within[None, :]
        tl.store(kept, lower, mask=both)
        tl.store(kept + half_head, upper, mask=both)
