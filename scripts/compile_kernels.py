"""Compile the fused kernels for a GPU that need not be there, at the sizes of OpenVLA-7B.

`python -m scripts.compile_kernels` prints registers, spills and shared memory of each program,
and fails where one spills much. Needs Triton (extra `dev`), no driver and no device.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deft_client.measures.table import markdown_table
from deft_policies.model.kernels import programs
from deft_policies.model.kernels.launch import STAGES, TILES, WARPS_OF_ROWS

CAPABILITY = 90
_HEADS = {"NUM_HEADS": 32, "NUM_KV_HEADS": 32, "HEAD_DIM": 128}
_TENSOR, _WIDE, _PRECISE, _INDEX = "*bf16", "*fp32", "*fp64", "*i64"
_ALIGNED = ("num_in", "num_out")  # multiples of 16, as Triton finds when it starts a program
_FEW_BYTES = 16  # spilled by a thread: no program is faster without


@dataclass(frozen=True)
class Variant:
    """A program with the constants of one use of it."""

    name: str
    program: Any
    types: dict[str, str] = field(default_factory=dict)  # of arguments that are not bf16 tensors
    constants: dict[str, int | bool] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = STAGES

    def source(self) -> ASTSource:
        """What the compiler reads; pointers are taken to be aligned, as PyTorch's are."""
        names = [name for name in self.program.arg_names if name not in self.constants]
        signature = {name: self.types.get(name, _TENSOR) for name in names}
        signature |= dict.fromkeys(self.constants, "constexpr")
        ordered = {name: signature[name] for name in self.program.arg_names}
        aligned = {
            (self.program.arg_names.index(name),): [["tt.divisibility", 16]]
            for name in names
            if ordered[name].startswith("*") or name in _ALIGNED
        }
        return ASTSource(self.program, ordered, self.constants, aligned)


def variants() -> Iterator[Variant]:
    """Every program, the attention by number of queries and of shares."""
    row = {"width": "i32", "eps": "fp32"}
    yield Variant("rms_norm", programs.rms_norm, row, {"BLOCK": 4096})
    for width, scaled in ((1024, True), (1152, False)):
        constants = {"HAS_SCALE": scaled, "BLOCK": triton.next_power_of_2(width)}
        yield Variant(f"add_layer_norm {width}", programs.add_layer_norm, row, constants)
    yield Variant("silu_times", programs.silu_times, row, {"BLOCK": 1024})
    fp8 = {"out": "*fp8e4nv", "scales": _WIDE, "width": "i32"}
    yield Variant("quantise_rows", programs.quantise_rows, fp8, {"BLOCK": 4096})
    norm = {**fp8, "eps": "fp32"}
    yield Variant("rms_norm_fp8", programs.rms_norm_fp8, norm, {"HAS_BRANCH": True, "BLOCK": 4096})
    widest = {"BLOCK": 16384}
    yield Variant("silu_times_fp8", programs.silu_times_fp8, fp8, widest, WARPS_OF_ROWS)
    slots = {"slots": _INDEX, "rotation_stride": "i32"}
    yield Variant("rotate_append", programs.rotate_append, slots, {**_HEADS, "BLOCK": 128})
    scalars = dict.fromkeys(("num_nodes", "row_length", "mask_stride"), "i32")
    sums = {"partial": _PRECISE, "totals": _PRECISE}
    types = {**sums, "mask": _WIDE, "ends": _INDEX, "scale": "fp32", **scalars}
    for queries in (16, 32):
        cut = {"QUERIES": queries, "SCORES": 64, "SLOTS": 32}
        constants = {**_HEADS, "NUM_SPLITS": 8, **cut, "BLOCK": 128}
        yield Variant(f"attend_split {queries}", programs.attend_split, types, constants)
    constants = {"HEAD_DIM": 128, "NUM_SPLITS": 8, "BLOCK": 128}
    yield Variant("join_splits", programs.join_splits, {**sums, "num_entries": "i32"}, constants)
    sizes = dict.fromkeys(("num_rows", "num_in", "num_out"), "i32")
    flags = {"HAS_BIAS": False, "HAS_RESIDUAL": True, "IS_WHOLE": True}
    for tiles in TILES:
        constants = {
            **flags, "ROWS": tiles.rows, "COLUMNS": tiles.columns, "INNER": tiles.inner
        }  # fmt: skip
        name = f"product {tiles.rows}"
        yield Variant(name, programs.product, sizes, constants, tiles.num_warps, tiles.num_stages)


def compile_variant(variant: Variant) -> tuple[int, int, int]:
    """Compile down to machine code and read what the assembler says of it.

    Registers and bytes spilled (stores and loads) of a thread, and bytes of shared memory.
    """
    target, options = (
        GPUTarget("cuda", CAPABILITY, 32),
        {"num_stages": variant.num_stages, "num_warps": variant.num_warps},
    )
    built = triton.compile(variant.source(), target=target, options=options)
    report = _assemble(built.asm["ptx"])
    registers = re.search(r"Used (\d+) registers", report)
    if registers is None:
        raise RuntimeError(f"ptxas said nothing of registers: {report!r}")
    spills = re.findall(r"(\d+) bytes spill", report)
    return int(registers[1]), sum(map(int, spills)), built.metadata.shared


def _assemble(ptx: str) -> str:
    ptxas = triton.knobs.nvidia.ptxas.path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "program.ptx"
        source.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name=sm_{CAPABILITY}a", str(source)]
        command += ["-o", str(Path(folder) / "program.cubin")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def main() -> int:
    """Print one line per program; 1 where one spills more than a few bytes."""
    print(f"sm_{CAPABILITY}, Triton {triton.__version__}")
    found = {variant.name: compile_variant(variant) for variant in variants()}
    rows = [[name, *map(str, one)] for name, one in found.items()]
    columns = ["program", "registers", "spill bytes", "shared bytes"]
    print(markdown_table(columns, rows, aligned=True))
    return int(any(spill_bytes > _FEW_BYTES for _, spill_bytes, _ in found.values()))


if __name__ == "__main__":
    sys.exit(main())
