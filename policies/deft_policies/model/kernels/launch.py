"""Tensors in, launches out: the fused operations of a layer. Imports Triton, so only where it is.

Every function is one launch, `attend` two. Scalars that change from pass to pass are not
specialised on: what was compiled for one pass serves all others of the same model.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from deft_policies.model.kernels import programs
from deft_policies.model.quantization import Fp8Rows
from deft_policies.model.sizes import LlamaSizes

_SLOTS = 32  # whose values a program adds together: more would take more registers than there are
_SCORES = 64  # slots that it scores together
_QUERIES = (16, 32)  # the same; fewer are no matrix product. Both are summed by one instruction
_MOST_SPLITS = 8
_PROGRAMS = 256  # fill a device: with fewer, slots are split among more
_COLUMNS = 1024
WARPS_OF_ROWS = 16  # for a whole row of the widest matrix: fewer would keep too much in each
STAGES = 2  # of loads on their way: more take shared memory that small GPUs have not


@dataclass(frozen=True)
class _Tiles:
    """How a matrix product is cut; every sum is the same for all of them."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


# For so many rows at most. Each takes less than 99 KiB of shared memory.
TILES = (
    _Tiles(16, 32, 256, num_warps=4, num_stages=4),  # the weight is all that is read
    _Tiles(64, 32, 128, num_warps=4, num_stages=4),
    _Tiles(128, 128, 64, num_warps=8, num_stages=3),
)

Grid = tuple[int, ...]
Arguments = tuple[Tensor | int | float, ...]
Constants = dict[str, int]  # what a program is compiled for
Launch = Callable[[Any, Grid, Arguments, Constants], None]


def start(kernel: Any, grid: Grid, arguments: Arguments, constants: Constants) -> None:
    """Start a Triton program on the tensors' device."""
    kernel[grid](*arguments, **constants)


@dataclass(frozen=True)
class FusedKernels:
    """The operations; `launch` starts them."""

    launch: Launch = start
    # Whether PyTorch's product of such shapes has the bits of ours.
    _equals_ours: dict[Hashable, bool] = field(default_factory=dict)

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise [token, width]."""
        tokens, width = hidden.shape
        out = torch.empty_like(hidden)
        block = triton.next_power_of_2(width)
        given = (hidden, weight, out, width, eps)
        self.launch(programs.rms_norm, (tokens,), given, {"BLOCK": block})
        return out

    def add_layer_norm(
        self, residual: Tensor, branch: Tensor, scale: Tensor | None, norm: torch.nn.LayerNorm
    ) -> tuple[Tensor, Tensor]:
        """residual + branch * scale, and its layer norm; [..., width] each."""
        width = residual.shape[-1]
        total, out = torch.empty_like(residual), torch.empty_like(residual)
        factors = residual if scale is None else scale
        given = (residual, branch, factors, norm.weight, norm.bias, total, out, width, norm.eps)
        constants = {"HAS_SCALE": scale is not None, "BLOCK": triton.next_power_of_2(width)}
        self.launch(programs.add_layer_norm, (residual.numel() // width,), given, constants)
        return total, out

    def silu_times(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [token, 2 * width]."""
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, width)
        grid = (tokens, triton.cdiv(width, _COLUMNS))
        self.launch(programs.silu_times, grid, (gate_up, out, width), {"BLOCK": _COLUMNS})
        return out

    def rms_norm_fp8(
        self, hidden: Tensor, branch: Tensor | None, weight: Tensor, eps: float
    ) -> Fp8Rows:
        """`rms_norm`, ready for a matrix in fp8; a branch is added to `hidden` before, in place."""
        tokens, width = hidden.shape
        rows = Fp8Rows.like(hidden, width)
        added = hidden if branch is None else branch
        given = (hidden, added, weight, rows.values, rows.scales, width, eps)
        constants = {"HAS_BRANCH": branch is not None, "BLOCK": triton.next_power_of_2(width)}
        self.launch(programs.rms_norm_fp8, (tokens,), given, constants)
        return rows

    def silu_times_fp8(self, gate_up: Tensor) -> Fp8Rows:
        """`silu_times`, ready for a matrix in fp8."""
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        rows = Fp8Rows.like(gate_up, width)
        given = (gate_up, rows.values, rows.scales, width)
        constants = {"BLOCK": triton.next_power_of_2(width), "num_warps": WARPS_OF_ROWS}
        self.launch(programs.silu_times_fp8, (tokens,), given, constants)
        return rows

    def quantise_rows(self, wide: Tensor) -> Fp8Rows:
        """[token, width] in fp8."""
        tokens, width = wide.shape
        rows = Fp8Rows.like(wide, width)
        given = (wide, rows.values, rows.scales, width)
        block = triton.next_power_of_2(width)
        self.launch(programs.quantise_rows, (tokens,), given, {"BLOCK": block})
        return rows

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
        grid = (fused.shape[0], heads.num_heads + 2 * heads.num_kv_heads)
        given = (fused, cos, sin, cache, slots, cos.stride(0))
        constants = {**_constants(heads), "BLOCK": triton.next_power_of_2(heads.head_dim)}
        self.launch(programs.rotate_append, grid, given, constants)

    def multiplies(self, weight: Tensor) -> bool:
        """Whether `product` takes a weight; PyTorch's own is faster in float32."""
        return weight.element_size() == 2 and weight.is_contiguous()

    def product(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """[token, in] times weight [out, in]: to every token the bits that it has alone.

        A residual [token, out] is added to in place, and returned.
        """
        out = rows.new_empty(len(rows), len(weight)) if residual is None else residual
        if len(rows) > TILES[0].rows and self._agrees(weight, bias, out, residual):
            return _multiply_by_pytorch(rows, weight, bias, out, residual)
        return self._multiply(rows.contiguous(), weight, bias, out, residual)

    def _agrees(
        self, weight: Tensor, bias: Tensor | None, out: Tensor, residual: Tensor | None
    ) -> bool:
        """Whether PyTorch's own product, which is faster for many rows, has the same bits here.

        Only this machine can tell. It is asked once about every shape: by the first pass, which
        runs before it is captured.
        """
        if not out.is_cuda:
            return False
        key = (weight.shape, len(out), bias is None, residual is None)
        if key not in self._equals_ours and not torch.cuda.is_current_stream_capturing():
            rows = torch.randn(len(out), weight.shape[1], device=out.device).to(out)
            ours, theirs = torch.randn_like(out), torch.empty_like(out)
            theirs.copy_(ours)
            self._multiply(rows, weight, bias, ours, None if residual is None else ours)
            added = None if residual is None else theirs
            theirs = _multiply_by_pytorch(rows, weight, bias, theirs, added)
            self._equals_ours[key] = torch.equal(ours, theirs)
        return self._equals_ours.get(key, False)

    def _multiply(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        residual: Tensor | None,
    ) -> Tensor:
        (num_rows, num_in), num_out = rows.shape, len(weight)
        tiles = next((one for one in TILES if num_rows <= one.rows), TILES[-1])
        given = (rows, weight, weight if bias is None else bias, out, out)
        constants = {
            "HAS_BIAS": bias is not None,
            "HAS_RESIDUAL": residual is not None,
            "IS_WHOLE": num_in % tiles.inner == 0,
            "ROWS": tiles.rows,
            "COLUMNS": tiles.columns,
            "INNER": tiles.inner,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }
        grid = (triton.cdiv(num_rows, tiles.rows), triton.cdiv(num_out, tiles.columns))
        self.launch(programs.product, grid, (*given, num_rows, num_in, num_out), constants)
        return out

    def attend(
        self, fused: Tensor, cache: Tensor, mask: Tensor, ends: Tensor, heads: LlamaSizes
    ) -> Tensor:
        """Mix [row * node, head * head_dim] out of one layer's cache [row, slot, ...].

        `mask` [row, 1, node, slot] in float32 is added to the scores; nothing is seen from `ends`
        [row, node] on. The rows of the cache are contiguous. How slots and queries are divided
        changes no bit of the result.
        """
        num_rows, _, num_nodes, read = mask.shape
        head_dim, group = heads.head_dim, heads.num_heads // heads.num_kv_heads
        few, many = _QUERIES
        queries = few if num_nodes * group <= few else many
        blocks = heads.num_kv_heads * triton.cdiv(num_nodes * group, queries)
        splits = min(_MOST_SPLITS, _PROGRAMS // (num_rows * blocks), triton.cdiv(read, _SLOTS))
        splits = 1 << max(splits.bit_length() - 1, 0)  # few values: each is compiled by itself
        entries = num_rows * num_nodes * heads.num_heads
        partial = torch.empty(splits, entries, head_dim, device=fused.device, dtype=torch.float64)
        totals = partial.new_empty(splits, entries)
        out = fused.new_empty(num_rows * num_nodes, heads.num_heads * head_dim)
        block = triton.next_power_of_2(head_dim)
        scalars = (num_nodes, cache.shape[1], mask.stride(2), head_dim**-0.5)
        constants = {
            **_constants(heads),
            "NUM_SPLITS": splits,
            "QUERIES": queries,
            "SCORES": _SCORES,
            "SLOTS": _SLOTS,
            "BLOCK": max(block, few),
            "num_stages": STAGES,
        }
        grid = (num_rows, blocks, splits)
        given = (fused, cache, mask, ends, partial, totals, *scalars)
        self.launch(programs.attend_split, grid, given, constants)
        constants = {"HEAD_DIM": head_dim, "NUM_SPLITS": splits, "BLOCK": block}
        self.launch(programs.join_splits, (entries,), (partial, totals, out, entries), constants)
        return out


def _multiply_by_pytorch(
    rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, residual: Tensor | None
) -> Tensor:
    """The product, and then a bias or what is there already."""
    turned = weight.t()
    if residual is not None:
        return residual.add_(torch.mm(rows, turned))
    return torch.mm(rows, turned, out=out) if bias is None else torch.addmm(bias, rows, turned)


def _constants(heads: LlamaSizes) -> Constants:
    return {
        "NUM_HEADS": heads.num_heads,
        "NUM_KV_HEADS": heads.num_kv_heads,
        "HEAD_DIM": heads.head_dim,
    }
