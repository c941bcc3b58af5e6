"""Fused kernels, under Triton's interpreter, against the plain operations that they replace."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton", reason="fused kernels need Triton")

from deft_policies.model.kernels import launch
from deft_policies.model.kernels.launch import NARROW, TILES, WEIGHT_FIRST, Tiles
from deft_policies.model.llama import GATES, RMSNorm, rotate_
from deft_policies.model.quantization import Fp8Linear, Int4Linear, Matrix, NarrowLinear
from deft_policies.model.sizes import Gate, LlamaSizes
from tests.draws import IS_NIGHT, pairwise
from tests.triton_twins import Counted

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
FORMATS = [torch.float32, torch.bfloat16]
# The interpreter cannot multiply matrices of bfloat16; float16 takes the same way.
PRODUCT_FORMATS = [torch.float32, torch.float16]


def head_sizes(num_kv_heads: int) -> LlamaSizes:
    return LlamaSizes(1, 32, 1, 1, num_heads=4, num_kv_heads=num_kv_heads, head_dim=8)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def eighths(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Products of them are exact: the interpreter multiplies with the host's library."""
    return (random(*shape, dtype=dtype, seed=seed) * 8).round() / 8


def assert_alike(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    bound = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("width", [40])
def test_the_fused_rms_norm_equals_the_plain_one(dtype: torch.dtype, width: int) -> None:
    norm = RMSNorm(width, 1e-6).to(dtype)
    norm.weight.data = random(width, dtype=dtype, seed=1)
    hidden = random(5, width, dtype=dtype)
    assert_alike(Counted().kernels.rms_norm(hidden, norm.weight, 1e-6), norm(hidden))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("is_scaled", [True, False])
def test_adding_a_branch_and_normalising_the_sum(dtype: torch.dtype, is_scaled: bool) -> None:
    norm = torch.nn.LayerNorm(24, eps=1e-6).to(dtype)
    norm.weight.data, norm.bias.data = random(24, dtype=dtype), random(24, dtype=dtype, seed=1)
    residual, branch = random(2, 3, 24, dtype=dtype, seed=2), random(2, 3, 24, dtype=dtype, seed=3)
    scale = random(24, dtype=dtype, seed=4) if is_scaled else None
    total, out = Counted().kernels.add_layer_norm(residual, branch, scale, norm)
    expected = residual + (branch if scale is None else branch * scale)
    assert_alike(total, expected)
    assert_alike(out, norm(total))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("gate", GATES)
def test_the_fused_gate_times_up_equals_the_plain_product(dtype: torch.dtype, gate: Gate) -> None:
    gate_up = random(3, 2 * 48, dtype=dtype)
    opening, up = gate_up.chunk(2, dim=1)
    found = Counted().kernels.gate_times_up(gate_up, gate)
    assert_alike(found, GATES[gate](opening) * up)


@pytest.mark.filterwarnings("ignore:overflow")  # a sigmoid's, whose inverse is 0
@pytest.mark.parametrize("gate", GATES)
def test_gates_of_numbers_far_from_zero_are_finite(gate: Gate) -> None:
    opening = torch.tensor([[-1e4, -30.0, -0.0, 0.0, 30.0, 1e4]])
    found = Counted().kernels.gate_times_up(torch.cat((opening, torch.ones(1, 6)), 1), gate)
    assert_alike(found, GATES[gate](opening))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_rotating_and_appending_in_one_launch(dtype: torch.dtype, num_kv_heads: int) -> None:
    heads = head_sizes(num_kv_heads)
    num_rotated, slots = 4 + num_kv_heads, torch.tensor([9, 3, 17])
    fused = random(3, (4 + 2 * num_kv_heads) * 8, dtype=dtype)
    cos, sin = random(3, 8, dtype=dtype, seed=1), random(3, 8, dtype=dtype, seed=2)
    cache = random(2, 10, 2 * num_kv_heads, 8, dtype=dtype, seed=3)
    plain, expected = fused.clone().view(3, -1, 8), cache.clone()
    rotate_(plain[:, :num_rotated], cos[:, None], sin[:, None])
    expected.view(20, 2 * num_kv_heads, 8)[slots] = plain[:, 4:]
    Counted().kernels.rotate_append(fused, (cos, sin), cache, slots, heads)
    assert_alike(fused.view(3, -1, 8)[:, :4], plain[:, :4])
    assert_alike(cache, expected)


@dataclass(frozen=True)
class Row:
    """One row of a pass: where its tree lies, and what its prompt was."""

    parents: Sequence[int]
    root: int
    num_prompt: int
    slot: int = 0
    two_way: int = 0

    @property
    def numbers(self) -> Tensor:
        """As they are uploaded: no tokens, which attention does not read."""
        depths, ancestors = list[int](), list[int]()
        for node, parent in enumerate(self.parents):
            depths.append(depths[parent] + 1 if node else 0)
            ancestors.append((ancestors[parent] if node else 0) | 1 << node)
        words = [
            (one >> 64 * word & (1 << 64) - 1) - (1 << 64) * (one >> 64 * word + 63 & 1)
            for one in ancestors
            for word in range(-(-len(depths) // 64))
        ]
        header = [self.root, 0, self.num_prompt, self.slot, self.two_way]
        return torch.tensor([*header, *[0] * len(depths), *depths, *words])


def ancestors_seen(row: Row, num_positions: int) -> Tensor:
    """What each node sees, [node, position], one by one."""
    found = torch.zeros(len(row.parents), num_positions, dtype=torch.bool)
    for node in range(len(row.parents)):
        found[node, : row.root] = True
        above = node
        while above >= 0:
            found[node, row.root + above] = True
            above = row.parents[above]
    return found


def prompt_seen(row: Row, num_tokens: int) -> Tensor:
    """What each token of a prompt with guesses behind it sees, [token, position]."""
    places = torch.arange(num_tokens)
    found = places <= places[:, None]
    found |= (places < row.two_way) & (places < row.two_way)[:, None]
    end = row.root + len(row.parents)
    found[row.root : end] = ancestors_seen(row, num_tokens)
    return found


def attended(
    fused: Tensor, cache: Tensor, slots: Sequence[int], seen: Sequence[Tensor], heads: LlamaSizes
) -> Tensor:
    """The slow twin of `attend`: PyTorch's attention with a mask, row by row."""
    rows = fused.view(len(slots), -1, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
    group, found = heads.num_heads // heads.num_kv_heads, list[Tensor]()
    for row, slot, mask in zip(rows, slots, seen, strict=True):
        strip = cache[slot, : mask.shape[1]].transpose(0, 1).repeat_interleave(group, dim=0)
        keys, values = strip.chunk(2)
        queries = row[:, : heads.num_heads].transpose(0, 1)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        found.append(mixed.transpose(0, 1).flatten(1))
    return torch.cat(found)


CHAIN_OF_8 = tuple(range(-1, 7))
BRANCHING = (-1, 0, 0, 1, 2, 3, 3, 5, 0)
WIDE = (-1, *(node // 2 for node in range(69)))  # two words of ancestors


TREES = [(4, (-1,)), (1, CHAIN_OF_8), (4, BRANCHING), (1, WIDE)]  # of heads, of nodes
# The interpreter takes six seconds for the wide one: in one format, and in both every night.
WIDE_FORMATS = PRODUCT_FORMATS if IS_NIGHT else PRODUCT_FORMATS[1:]


@pytest.mark.parametrize(
    ("dtype", "num_kv_heads", "parents"),
    [
        (dtype, *tree)
        for tree in TREES
        for dtype in (WIDE_FORMATS if tree[1] is WIDE else PRODUCT_FORMATS)
    ],
)
def test_nodes_attend_to_what_is_before_the_root_and_to_their_ancestors(
    dtype: torch.dtype, num_kv_heads: int, parents: tuple[int, ...]
) -> None:
    """Rows of two lengths in slots of 400 positions: in the one the tree follows a long text."""
    heads = head_sizes(num_kv_heads)
    rows = [Row(parents, 70, 64, slot=1), Row(parents, 290, 150, slot=0)]
    fused = random(2 * len(parents), (4 + 2 * num_kv_heads) * 8, dtype=dtype)
    cache = random(2, 400, 2 * num_kv_heads, 8, dtype=dtype, seed=1)
    counted = Counted()
    numbers = torch.stack([row.numbers for row in rows])
    found = counted.kernels.attend(fused, cache, numbers, len(parents), heads)
    seen = [ancestors_seen(row, 400) for row in rows]
    assert_alike(found, attended(fused, cache, [1, 0], seen, heads))
    assert counted.launched == ["attend"]


@pytest.mark.parametrize(
    ("dtype", "two_way", "num_prompt"), pairwise(PRODUCT_FORMATS, [0, 40], [50, 64])
)
def test_a_prompt_with_guesses(dtype: torch.dtype, two_way: int, num_prompt: int) -> None:
    """Padding behind the guesses sees whatever it likes."""
    heads, num_tokens = head_sizes(2), 80
    row = Row(BRANCHING, num_prompt - 1, num_prompt, two_way=two_way)
    fused = eighths(num_tokens, 64, dtype=dtype)
    cache = eighths(1, 128, 4, 8, dtype=dtype, seed=1)
    numbers = row.numbers[None]
    kernels, width = Counted().kernels, len(BRANCHING)
    found = kernels.attend(fused, cache, numbers, width, heads, is_prefill=True)
    expected = attended(fused, cache, [0], [prompt_seen(row, num_tokens)], heads)
    assert_alike(found, expected)
    # The last layer computes the nodes alone.
    here = slice(row.root, row.root + width)
    assert_alike(kernels.attend(fused[here], cache, numbers, width, heads), found[here])


@pytest.mark.parametrize(("num_prompt", "root"), [(90, 100), (140, 280)])
def test_a_node_has_the_same_bits_however_slots_are_split(
    num_prompt: int, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kernels, dtype = head_sizes(2), Counted().kernels, torch.float16
    fused, cache = eighths(9, 64, dtype=dtype), eighths(1, 400, 4, 8, dtype=dtype, seed=1)
    numbers = Row(BRANCHING, root, num_prompt).numbers[None]
    expected = kernels.attend(fused, cache, numbers, len(BRANCHING), heads)
    for most in (1, 2, 4):
        monkeypatch.setattr(launch, "_MOST_SPLITS", most)
        assert torch.equal(kernels.attend(fused, cache, numbers, len(BRANCHING), heads), expected)


@pytest.mark.parametrize("root", [100, 270])
def test_a_node_has_the_bits_that_plain_decoding_gives_it(root: int) -> None:
    """There its ancestors lie one behind the other, and it is alone in its pass."""
    heads, kernels, num_prompt, dtype = head_sizes(2), Counted().kernels, 90, torch.float16
    fused, cache = eighths(9, 64, dtype=dtype), eighths(1, 400, 4, 8, dtype=dtype, seed=1)
    numbers = Row(BRANCHING, root, num_prompt).numbers[None]
    among = kernels.attend(fused, cache, numbers, len(BRANCHING), heads)
    for node in range(len(BRANCHING)):
        path = [node]
        while path[0]:
            path.insert(0, BRANCHING[path[0]])
        compact = cache.clone()
        compact[:, root : root + len(path)] = cache[:, [root + one for one in path]]
        alone = Row((-1,), root + len(path) - 1, num_prompt).numbers[None]
        found = kernels.attend(fused[node : node + 1], compact, alone, 1, heads)
        assert torch.equal(found[0], among[node])


def test_a_row_without_an_answer_attends_to_nothing() -> None:
    heads, cache = head_sizes(4), random(2, 100, 8, 8, dtype=torch.float32)
    rows = [Row((-1,), 50, 40), Row((-1,), 90, 0, slot=1)]
    numbers = torch.stack([row.numbers for row in rows])
    cache[1] = torch.nan
    found = Counted().kernels.attend(random(2, 96, dtype=torch.float32), cache, numbers, 1, heads)
    assert found[0].isfinite().all()
    assert not found[1].any()


@pytest.mark.parametrize(
    ("dtype", "num_rows", "num_in"),
    pairwise(PRODUCT_FORMATS, [1, 60, 130], [64, 136]),  # by all the tiles there are
)
def test_a_product_with_a_bias_or_what_is_there_already(
    dtype: torch.dtype, num_rows: int, num_in: int
) -> None:
    kernels, num_out = Counted().kernels, 72
    rows, weight = random(num_rows, num_in, dtype=dtype), random(num_out, num_in, dtype=dtype)
    weight *= num_in**-0.5
    bias, residual = random(num_out, dtype=dtype), random(num_rows, num_out, dtype=dtype, seed=1)
    assert_alike(kernels.product(rows, Matrix(weight)), functional.linear(rows, weight))
    assert_alike(kernels.product(rows, Matrix(weight, bias)), functional.linear(rows, weight, bias))
    expected = residual + functional.linear(rows, weight)
    assert kernels.product(rows, Matrix(weight), residual=residual) is residual
    assert_alike(residual, expected)


@pytest.mark.parametrize("dtype", PRODUCT_FORMATS)
@pytest.mark.parametrize(("num_rows", "num_in"), [(5, 64), (70, 136)])
def test_a_product_of_a_tower_may_have_gelu_in_it(
    dtype: torch.dtype, num_rows: int, num_in: int
) -> None:
    """Rounded before it, as where two launches compute both."""
    counted = Counted()
    kernels = replace(counted.kernels, of_towers=launch.OF_TOWERS)
    rows = eighths(num_rows, num_in, dtype=dtype)
    weight, bias = eighths(72, num_in, dtype=dtype, seed=1) / 8, eighths(72, dtype=dtype, seed=2)
    plain = counted.kernels.look(rows, Matrix(weight, bias))
    assert torch.equal(kernels.look(rows, Matrix(weight, bias)), plain)
    counted.launched.clear()
    assert_alike(kernels.look(rows, Matrix(weight, bias), has_gelu=True), functional.gelu(plain))
    assert counted.launched == ["product"]


@pytest.mark.parametrize(
    ("num_rows", "num_in", "gate"), pairwise([1, 5, NARROW + 1], [64, 136], [*GATES])
)
def test_gate_and_up_are_multiplied_and_opened_in_one_launch(
    num_rows: int, num_in: int, gate: Gate
) -> None:
    """With few rows; bit for bit what two launches find."""
    counted, dtype = Counted(), torch.float16
    kernels = counted.kernels
    rows = eighths(num_rows, num_in, dtype=dtype)
    matrix = Matrix(eighths(2 * 72, num_in, dtype=dtype, seed=1) / 8)
    expected = kernels.gate_times_up(kernels.product(rows, matrix), gate)
    counted.launched.clear()
    assert torch.equal(kernels.open(rows, matrix, gate), expected)
    assert len(counted.launched) == (1 if num_rows <= NARROW else 2)


@pytest.mark.parametrize(
    ("num_rows", "has_bias", "head_dim"), pairwise([1, 5, NARROW + 1], [False, True], [16, 24])
)
def test_queries_keys_and_values_are_multiplied_and_rotated_in_one_launch(
    num_rows: int, has_bias: bool, head_dim: int
) -> None:
    """With few rows; bit for bit what two launches find."""
    counted, dtype = Counted(), torch.float16
    kernels = counted.kernels
    heads = replace(head_sizes(2), head_dim=head_dim)
    rows, slots = eighths(num_rows, 64, dtype=dtype), torch.arange(num_rows) * 2
    weight = eighths(8 * head_dim, 64, dtype=dtype, seed=1) / 8
    matrix = Matrix(weight, eighths(8 * head_dim, dtype=dtype, seed=2) if has_bias else None)
    both = random(num_rows, 2 * head_dim, dtype=dtype, seed=3)
    rotation = both[:, :head_dim], both[:, head_dim:]
    caches = [torch.zeros(1, 2 * num_rows, 4, head_dim, dtype=dtype) for _ in range(2)]
    expected = kernels.product(rows, matrix)
    kernels.rotate_append(expected, rotation, caches[0], slots, heads)
    counted.launched.clear()
    found = kernels.project(rows, matrix, rotation, caches[1], slots, heads)
    assert len(counted.launched) == (1 if num_rows <= NARROW else 2)
    queries = slice(0, heads.num_heads * head_dim)
    assert torch.equal(found[:, queries], expected[:, queries])
    assert torch.equal(caches[1], caches[0])


@pytest.mark.parametrize("num_in", [128, 136])
@pytest.mark.parametrize("num_rows", [5, 40])
def test_the_weight_may_be_the_first_operand(num_rows: int, num_in: int) -> None:
    """What comes of it is the same, also where rotations or activations follow."""
    dtype, heads = torch.float16, replace(head_sizes(2), head_dim=24)
    plain = Counted().kernels
    kernels = replace(plain, tiles=WEIGHT_FIRST)
    rows, slots = eighths(num_rows, num_in, dtype=dtype), torch.arange(num_rows)
    weight = eighths(8 * heads.head_dim, num_in, dtype=dtype, seed=1) / 8
    matrix = Matrix(weight, eighths(len(weight), dtype=dtype, seed=2))
    residuals = [eighths(num_rows, len(weight), dtype=dtype, seed=3) for _ in range(2)]
    rotation = random(2, num_rows, heads.head_dim, dtype=dtype, seed=4).unbind()
    caches = [torch.zeros(1, num_rows, 4, heads.head_dim, dtype=dtype) for _ in range(2)]
    found, expected = (
        (
            one.product(rows, matrix),
            one.product(rows, Matrix(weight), residual=residual),
            one.open(rows, Matrix(weight), "silu"),
            one.project(rows, matrix, (rotation[0], rotation[1]), cache, slots, heads)[:, :96],
            cache,
        )
        for one, residual, cache in zip((kernels, plain), residuals, caches, strict=True)
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("num_rows", "kind", "tiles", "widens"),
    [
        # By all the ways there are.
        *[
            (num_rows, Fp8Linear, tiles, True)
            for num_rows in (1, 40)
            for tiles in (TILES, WEIGHT_FIRST)
        ],
        *[(num_rows, Int4Linear, TILES, True) for num_rows in (1, 40)],
        *[
            (70, kind, TILES, widens)
            for kind in (Fp8Linear, Int4Linear)
            for widens in (True, False)
        ],
    ],
)
@pytest.mark.parametrize("num_in", [256, 300])
def test_a_weight_in_few_bits_multiplies_as_the_same_numbers_in_16_bits(
    num_rows: int,
    kind: type[NarrowLinear],
    tiles: tuple[Tiles, ...],
    widens: bool,
    num_in: int,
) -> None:
    linear = torch.nn.Linear(num_in, 48, bias=False, dtype=torch.float16)
    linear.weight.data = random(48, num_in, dtype=torch.float16, seed=1) / 8
    narrow = kind(linear)
    wide = Matrix(narrow.weight.half())
    assert torch.equal(wide.weight.float(), narrow.weight)
    kernels = replace(Counted().kernels, tiles=tiles, widens=widens)
    rows = eighths(num_rows, num_in, dtype=torch.float16)
    # With the same tiles: the interpreter's library adds some shapes in another order.
    others = replace(kernels, tiles=WEIGHT_FIRST if kind is Int4Linear else tiles)
    assert torch.equal(kernels.product(rows, narrow.matrix), others.product(rows, wide))
    assert torch.equal(kernels.open(rows, narrow.matrix, "silu"), others.open(rows, wide, "silu"))


def test_a_weight_that_stays_wide_is_made_wide_once() -> None:
    layer = torch.nn.Linear(64, 40, bias=False, dtype=torch.float16)
    narrow = Fp8Linear(layer)
    counted = Counted()
    plain, kept = counted.kernels, replace(counted.kernels, keeps_wide=True)
    rows = eighths(70, 64, dtype=torch.float16)
    expected = plain.product(rows, narrow.matrix)
    counted.launched.clear()
    assert torch.equal(kept.product(rows, narrow.matrix), expected)
    assert torch.equal(kept.product(rows, narrow.matrix), expected)
    assert counted.launched == ["widen", "product", "product"]


def test_who_multiplies_is_said_of_every_shape_that_was_asked_about() -> None:
    asked = {((64, 32), 40, True, True): True, ((64, 588), 40, False, True): False}
    kernels = replace(Counted().kernels, _equals_ours=asked)
    assert kernels.describe_products() == (
        "PyTorch multiplies 1 of 2 shapes, with the bits of our own product; "
        "ours: 40 rows by 64x588"
    )
