"""Tensors in, launches out: the fused operations of a layer. Imports Triton, so only where it is.

Every function is one launch. Scalars that change from pass to pass are not specialised on: what was
compiled for one pass serves all others of the same model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from deft_policies.model.fused_attention import CHUNK, NUM_HEADER
from deft_policies.model.kernels import programs
from deft_policies.model.quantization import GROUP, Matrix
from deft_policies.model.sizes import Gate, LlamaSizes

_TAIL = 16  # positions behind the border that a program adds together
_QUERIES = 16  # of a program: the fewest that are a matrix product
_MOST_SPLITS = 8
_PROGRAMS = 256  # fill a device: with fewer, slots are divided among more
_MOST_COUNTS = 8192  # programs without their splits
_COLUMNS = 1024
_HEADS = 8  # that one program rotates
STAGES = 2  # of loads in flight: more take shared memory that small GPUs have not
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tiles:
    """How a matrix product is cut; every sum is the same for all of them."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int
    weight_first: bool = False  # of the operands of the matrix instructions


# For so many rows at most. Each takes less than 99 KiB of shared memory.
TILES = (
    Tiles(16, 32, 256, num_warps=4, num_stages=4),  # the weight is all that is read
    Tiles(64, 32, 128, num_warps=4, num_stages=4),
    Tiles(128, 128, 64, num_warps=8, num_stages=3),
)
# The same with the weight as the first operand: a shorter chain of instructions for few rows, and
# on a Hopper GPU one order of sums for all rows of a weight in few bits. No GPU has run these, so
# nothing but `scripts.bench gpu` asks for them.
WEIGHT_FIRST = (
    Tiles(16, 64, 128, num_warps=4, num_stages=4, weight_first=True),
    Tiles(64, 64, 128, num_warps=4, num_stages=3, weight_first=True),
    TILES[2],
)
# For the towers' products, which have few columns: enough programs for a GPU. No GPU has run these.
OF_TOWERS = Tiles(64, 64, 64, num_warps=4, num_stages=4)
# For weights in four bits. Of those a program reads two groups at a time.
_OF_GROUPS = (WEIGHT_FIRST[0], replace(WEIGHT_FIRST[1], num_stages=2))
NARROW = TILES[0].rows  # rows that are multiplied by our own product alone
# Major compute capabilities whose matrix instructions also read shared memory.
_READS_MEMORY = (9, 10, 11)
_MOST_NARROW_ROWS = TILES[1].rows  # for more a weight in few bits is first made wide

Grid = tuple[int, ...]
Arguments = tuple[Tensor | int | float, ...]
Constants = dict[str, int]  # what a program is compiled for
# Out and in of a weight, rows, whether there is no bias, whether nothing is added to.
_Asked = tuple[tuple[int, int], int, bool, bool]
Launch = Callable[[Any, Grid, Arguments, Constants], None]


def start(kernel: Any, grid: Grid, arguments: Arguments, constants: Constants) -> None:
    """Start a Triton program on the tensors' device."""
    kernel[grid](*arguments, **constants)


def add_whole_sums() -> None:
    """Ask PyTorch for products that add every sum from the first to the last, as ours do.

    It then has the bits of ours for more shapes, and more of them on a Hopper GPU are fast.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    try:
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
    except TypeError:  # before torch 2.10, where sums may still be split
        matmul.allow_bf16_reduced_precision_reduction = False


def kernels_for(device: torch.device) -> "FusedKernels":
    """As a GPU is served with them."""
    reads_memory = torch.cuda.get_device_capability(device)[0] in _READS_MEMORY
    return FusedKernels(widens=reads_memory)


@cache
def _counts(device: torch.device) -> Tensor:
    """How many splits have ended, by program; every program leaves zeros behind."""
    with torch.inference_mode(False):
        return torch.zeros(_MOST_COUNTS, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class FusedKernels:
    """The operations; `launch` starts them."""

    launch: Launch = start
    tiles: tuple[Tiles, ...] = TILES
    # Whether a weight in few bits is made wide for many rows. Where all matrix instructions read
    # registers, those of few bits are added in another order than wide ones.
    widens: bool = True
    # Whether a weight that was made wide stays so, as a copy beside it: twice its memory more, for
    # prefills as fast as those of wide weights. Nothing but a question to a GPU asks for it.
    keeps_wide: bool = False
    # What looks at frames is multiplied by our own product, cut like this; None: as the decoder.
    of_towers: Tiles | None = None
    # Whether PyTorch's product of such shapes has the bits of ours.
    _equals_ours: dict[_Asked, bool] = field(default_factory=dict)
    _wide: dict[int, Tensor] = field(default_factory=dict)  # copies by the address of the weight

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise [token, width]."""
        tokens, width = hidden.shape
        out = torch.empty_like(hidden)
        block = triton.next_power_of_2(width)
        arguments = (hidden, weight, out, width, eps)
        self.launch(programs.rms_norm, (tokens,), arguments, {"BLOCK": block})
        return out

    def add_layer_norm(
        self, residual: Tensor, branch: Tensor, scale: Tensor | None, norm: torch.nn.LayerNorm
    ) -> tuple[Tensor, Tensor]:
        """residual + branch * scale, and its layer norm; [..., width] each."""
        width = residual.shape[-1]
        total, out = torch.empty_like(residual), torch.empty_like(residual)
        factors = residual if scale is None else scale
        arguments = (residual, branch, factors, norm.weight, norm.bias, total, out, width, norm.eps)
        constants = {"HAS_SCALE": scale is not None, "BLOCK": triton.next_power_of_2(width)}
        self.launch(programs.add_layer_norm, (residual.numel() // width,), arguments, constants)
        return total, out

    def gate_times_up(self, gate_up: Tensor, gate: Gate) -> Tensor:
        """gate(gate) * up of [token, 2 * width]."""
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, width)
        grid = (tokens, triton.cdiv(width, _COLUMNS))
        constants = {"IS_GELU": gate == "gelu_tanh", "BLOCK": _COLUMNS}
        self.launch(programs.gate_times_up, grid, (gate_up, out, width), constants)
        return out

    def rotate_append(
        self,
        fused: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: Tensor,
        slots: Tensor,
        heads: LlamaSizes,
    ) -> None:
        """Rotate queries of [token, head * head_dim] in place; append keys and values.

        `rotation` is cos and sin, [token, head_dim] with the same strides; `cache` is one layer and
        `slots` are flat indices into its rows.
        """
        cos, sin = rotation
        num_heads = heads.num_heads + 2 * heads.num_kv_heads
        grid = (fused.shape[0], triton.cdiv(num_heads, _HEADS))
        arguments = (fused, cos, sin, cache, slots, cos.stride(0))
        half = triton.next_power_of_2(heads.head_dim // 2)
        constants = {**_constants(heads), "HEADS": _HEADS, "HALF": half}
        self.launch(programs.rotate_append, grid, arguments, constants)

    def multiplies(self, weight: Tensor) -> bool:
        """Whether `product` takes a weight; PyTorch's own is faster in float32."""
        return weight.element_size() <= 2 and weight.is_contiguous()

    def product(self, rows: Tensor, matrix: Matrix, residual: Tensor | None = None) -> Tensor:
        """[token, in] times a matrix: to every token the bits that it has alone.

        A residual [token, out] is added to in place, and returned.
        """
        out = rows.new_empty(len(rows), len(matrix.weight)) if residual is None else residual
        if len(rows) <= NARROW:
            return self._multiply(rows.contiguous(), matrix, out, residual)
        if self.widens and matrix.scales is not None and len(rows) > _MOST_NARROW_ROWS:
            matrix = Matrix(self._widened(matrix, rows), matrix.bias)
        if self._agrees(matrix, out, residual):
            return _multiply_by_pytorch(rows, matrix, out, residual)
        return self._multiply(rows.contiguous(), matrix, out, residual)

    def look(self, rows: Tensor, matrix: Matrix, has_gelu: bool = False) -> Tensor:
        """`product` of what looks at frames, perhaps with GELU behind it."""
        if self.of_towers is None:
            found = self.product(rows, matrix)
            return functional.gelu(found) if has_gelu else found
        out = rows.new_empty(len(rows), len(matrix.weight))
        return self._multiply(rows.contiguous(), matrix, out, None, self.of_towers, has_gelu)

    def _widened(self, matrix: Matrix, like: Tensor) -> Tensor:
        """A weight in few bits in the format of `like`, which holds it exactly."""
        assert matrix.scales is not None
        address = matrix.weight.data_ptr()
        if address in self._wide:
            return self._wide[address]
        num_out, num_in = len(matrix.weight), like.shape[1]
        out = like.new_empty(num_out, num_in)
        grid = (num_out, triton.cdiv(num_in, _COLUMNS))
        arguments = (matrix.weight, matrix.scales, out, num_in)
        constants = {"BITS": matrix.bits, "BLOCK": _COLUMNS}
        self.launch(programs.widen, grid, arguments, constants)
        if self.keeps_wide:
            self._wide[address] = out
        return out

    def _agrees(self, matrix: Matrix, out: Tensor, residual: Tensor | None) -> bool:
        """Whether PyTorch's own product, which is faster for many rows, has the same bits here.

        Only this machine can tell. It is asked once about every shape: by the first pass, which
        runs before it is captured.
        """
        if not out.is_cuda or matrix.scales is not None:
            return False
        weight = matrix.weight
        shape = (len(weight), weight.shape[1])
        key = (shape, len(out), matrix.bias is None, residual is None)
        if key not in self._equals_ours and not torch.cuda.is_current_stream_capturing():
            rows = torch.randn(len(out), weight.shape[1], device=out.device).to(out)
            ours, theirs = torch.randn_like(out), torch.empty_like(out)
            theirs.copy_(ours)
            self._multiply(rows, matrix, ours, None if residual is None else ours)
            added = None if residual is None else theirs
            theirs = _multiply_by_pytorch(rows, matrix, theirs, added)
            self._equals_ours[key] = torch.equal(ours, theirs)
        return self._equals_ours.get(key, False)

    def describe_products(self) -> str:
        """Who multiplies more than `NARROW` rows, as far as this machine was asked."""
        ours = [
            f"{num_rows} rows by {num_out}x{num_in}"
            for ((num_out, num_in), num_rows, *_), is_theirs in self._equals_ours.items()
            if not is_theirs
        ]
        told = f"PyTorch multiplies {len(self._equals_ours) - len(ours)} of "
        told += f"{len(self._equals_ours)} shapes, with the bits of our own product"
        return told + (f"; ours: {', '.join(dict.fromkeys(ours))}" if ours else "")

    def _multiply(
        self,
        rows: Tensor,
        matrix: Matrix,
        out: Tensor,
        residual: Tensor | None,
        tiles: Tiles | None = None,
        has_gelu: bool = False,
    ) -> Tensor:
        (num_rows, num_in), num_out = rows.shape, len(matrix.weight)
        tiles = tiles or self._tiles_for(num_rows, matrix)
        grid = (triton.cdiv(num_rows, tiles.rows), triton.cdiv(num_out, tiles.columns))
        arguments = (rows, matrix.weight, *_given(matrix), out, out, num_rows, num_in, num_out)
        constants = {
            **_cut(tiles, matrix, num_in),
            "HAS_BIAS": matrix.bias is not None,
            "HAS_RESIDUAL": residual is not None,
            "HAS_GELU": has_gelu,
        }
        self.launch(programs.product, grid, arguments, constants)
        return out

    def _tiles_for(self, num_rows: int, matrix: Matrix) -> Tiles:
        tiles = _OF_GROUPS if matrix.bits == 4 else self.tiles
        return next((shape for shape in tiles if num_rows <= shape.rows), tiles[-1])

    def open(self, rows: Tensor, gate_up: Matrix, gate: Gate) -> Tensor:
        """gate(gate) * up of [token, in] times the matrix of both."""
        if len(rows) > NARROW:
            return self.gate_times_up(self.product(rows, gate_up), gate)
        (num_rows, num_in), width = rows.shape, len(gate_up.weight) // 2
        out = rows.new_empty(num_rows, width)
        tiles = self._tiles_for(num_rows, gate_up)
        grid = (1, triton.cdiv(width, tiles.columns // 2))
        scales = _given(gate_up)[0]
        arguments = (rows.contiguous(), gate_up.weight, scales, out, num_rows, num_in, width)
        constants = {"IS_GELU": gate == "gelu_tanh", **_cut(tiles, gate_up, num_in)}
        self.launch(programs.product_opened, grid, arguments, constants)
        return out

    def project(
        self,
        rows: Tensor,
        qkv: Matrix,
        rotation: tuple[Tensor, Tensor],
        cache: Tensor,
        slots: Tensor,
        heads: LlamaSizes,
    ) -> Tensor:
        """Multiply by the matrix of queries, keys and values, then as `rotate_append`.

        Returns [token, head * head_dim], of which the queries alone mean anything.
        """
        if len(rows) > NARROW:
            fused = self.product(rows, qkv)
            self.rotate_append(fused, rotation, cache, slots, heads)
            return fused
        (cos, sin), (num_rows, num_in) = rotation, rows.shape
        fused = rows.new_empty(num_rows, len(qkv.weight))
        arguments = (
            *(rows.contiguous(), qkv.weight, *_given(qkv), cos, sin, fused, cache, slots),
            *(num_rows, num_in, cos.stride(0)),
        )
        tiles = self._tiles_for(num_rows, qkv)
        num_heads = heads.num_heads + 2 * heads.num_kv_heads
        grid = (1, num_heads * triton.cdiv(heads.head_dim // 2, tiles.columns // 2))
        constants = {
            **_constants(heads),
            **_cut(tiles, qkv, num_in),
            "HAS_BIAS": qkv.bias is not None,
        }
        self.launch(programs.product_rotated, grid, arguments, constants)
        return fused

    def attend(
        self,
        fused: Tensor,
        cache: Tensor,
        numbers: Tensor,
        width: int,
        heads: LlamaSizes,
        is_prefill: bool = False,
    ) -> Tensor:
        """Mix [row * token, head * head_dim] out of one layer's cache [slot, position, ...].

        `numbers` [row, ..] say of each row where it is and what its `width` nodes see (see
        `programs.attend`). Tokens are the nodes, or all of a prompt with its guesses where it
        `is_prefill`. How positions and queries are divided changes no bit of the result.
        """
        num_rows = len(numbers)
        num_tokens = len(fused) // num_rows
        head_dim, group = heads.head_dim, heads.num_heads // heads.num_kv_heads
        blocks = heads.num_kv_heads * triton.cdiv(num_tokens * group, _QUERIES)
        splits = min(_MOST_SPLITS, _PROGRAMS // (num_rows * blocks))
        splits = 1 << max(splits.bit_length() - 1, 0)  # few values: each is compiled by itself
        entries = num_rows * num_tokens * heads.num_heads if splits > 1 else 0
        parts = triton.cdiv(cache.shape[1], CHUNK) + 1
        partial = torch.empty(parts, entries, head_dim, device=fused.device)
        totals, tops = partial.new_empty(2, parts, entries).unbind()
        out = fused.new_empty(num_rows * num_tokens, heads.num_heads * head_dim)
        block = triton.next_power_of_2(head_dim)
        words = (numbers.shape[1] - NUM_HEADER) // width - 2
        scale = head_dim**-0.5 * _LOG2_E
        scalars = (num_tokens, width, cache.shape[1], numbers.stride(0), scale)
        constants = {
            **_constants(heads),
            "WORDS": words,
            "IS_PREFILL": is_prefill,
            "NUM_SPLITS": splits,
            "QUERIES": _QUERIES,
            "CHUNK": CHUNK,
            "TAIL": _TAIL,
            "BLOCK": max(block, _QUERIES),
            "num_stages": STAGES,
            "num_warps": 4 if block <= 128 else 8,
        }
        grid = (num_rows, blocks, splits)
        counts = _counts(fused.device)
        arguments = (fused, cache, numbers, partial, totals, tops, counts, out, *scalars)
        self.launch(programs.attend, grid, arguments, constants)
        return out


def _multiply_by_pytorch(
    rows: Tensor, matrix: Matrix, out: Tensor, residual: Tensor | None
) -> Tensor:
    """The product, and then a bias or what is there already."""
    turned, bias = matrix.weight.t(), matrix.bias
    if residual is not None:
        return residual.add_(torch.mm(rows, turned))
    return torch.mm(rows, turned, out=out) if bias is None else torch.addmm(bias, rows, turned)


def _given(matrix: Matrix) -> tuple[Tensor, Tensor]:
    """Scales and biases; the weight where there are none, which nothing reads."""
    return (
        matrix.weight if matrix.scales is None else matrix.scales,
        matrix.weight if matrix.bias is None else matrix.bias,
    )


def _cut(tiles: Tiles, matrix: Matrix, num_in: int) -> Constants:
    """What a product is compiled for."""
    return {
        "BITS": matrix.bits,
        "IS_WHOLE": num_in % (2 * GROUP if matrix.bits == 4 else tiles.inner) == 0,
        "WEIGHT_FIRST": tiles.weight_first,
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "INNER": tiles.inner,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _constants(heads: LlamaSizes) -> Constants:
    return {
        "NUM_HEADS": heads.num_heads,
        "NUM_KV_HEADS": heads.num_kv_heads,
        "HEAD_DIM": heads.head_dim,
    }
