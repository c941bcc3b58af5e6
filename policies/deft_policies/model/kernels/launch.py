"""Tensors in, launches out: the fused operations of a layer. Imports Triton, so only where it is.

Every function is one launch, `attend` two. Scalars that change from pass to pass are not
specialised on: what was compiled for one pass serves all others of the same model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from deft_policies.model.kernels import programs
from deft_policies.model.quantization import Fp8Rows
from deft_policies.model.sizes import LlamaSizes

_SLOTS = 64  # that a program looks at together
_LEAST_QUERIES = 16  # of a matrix product, on every side
_MOST_SPLITS = 8
_COLUMNS = 1024
WARPS_OF_ROWS = 16  # for a whole row of the widest matrix: fewer would keep too much in each
STAGES = 2  # of loads on their way: more take shared memory that small GPUs have not

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

    def attend(self, fused: Tensor, cache: Tensor, mask: Tensor, heads: LlamaSizes) -> Tensor:
        """Mix [row * node, head * head_dim] out of one layer's cache [row, slot, ...].

        `mask` [row, 1, node, slot] is added to the scores. The rows of the cache are contiguous.
        """
        num_rows, _, num_nodes, read = mask.shape
        head_dim, group = heads.head_dim, heads.num_heads // heads.num_kv_heads
        # By the slots alone: the sums of a query must not depend on the rows and nodes beside it.
        splits = min(_MOST_SPLITS, triton.cdiv(read, _SLOTS))
        splits = 1 << (splits.bit_length() - 1)  # few values: each is compiled by itself
        entries = num_rows * num_nodes * heads.num_heads
        partial = torch.empty(splits, entries, head_dim, device=fused.device, dtype=torch.float32)
        summary = partial.new_empty(splits, entries, 2)
        out = fused.new_empty(num_rows * num_nodes, heads.num_heads * head_dim)
        block = triton.next_power_of_2(head_dim)
        scalars = (num_nodes, read, cache.shape[1], mask.stride(2), head_dim**-0.5)
        constants = {
            **_constants(heads),
            "NUM_SPLITS": splits,
            "QUERIES": max(_LEAST_QUERIES, triton.next_power_of_2(num_nodes * group)),
            "SLOTS": _SLOTS,
            "BLOCK": max(block, _LEAST_QUERIES),
            "num_stages": STAGES,
        }
        grid = (num_rows, heads.num_kv_heads, splits)
        given = (fused, cache, mask, partial, summary, *scalars)
        self.launch(programs.attend_split, grid, given, constants)
        constants = {"HEAD_DIM": head_dim, "NUM_SPLITS": splits, "BLOCK": block}
        self.launch(programs.join_splits, (entries,), (partial, summary, out, entries), constants)
        return out


def _constants(heads: LlamaSizes) -> Constants:
    return {
        "NUM_HEADS": heads.num_heads,
        "NUM_KV_HEADS": heads.num_kv_heads,
        "HEAD_DIM": heads.head_dim,
    }
