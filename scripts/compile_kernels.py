"""Compile the fused kernels for GPUs that need not be there, as OpenVLA-7B and 3Bs start them.

`python -m scripts.compile_kernels [80 90 ...]` prints registers, local memory and shared memory of
each program, and fails where one takes more than the bounds below allow. Needs Triton (extra
`dev`), no driver and no device.

Programs, constants and what Triton finds out about arguments (multiples of 16, aligned pointers)
are those of real passes: modules of the full width run all that a server captures once on a CPU,
and what they would start is compiled instead.
"""

import re
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

from deft_core.measures.table import markdown_table
from deft_policies.decoding.captured import WIDTHS
from deft_policies.decoding.target import Target
from deft_policies.model.formats import Quantization
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.kernels.launch import (
    OF_TOWERS,
    TILES,
    WEIGHT_FIRST,
    Arguments,
    Constants,
    FusedKernels,
    Grid,
)
from deft_policies.model.llama import Layer, LlamaDecoder
from deft_policies.model.quantization import quantize_linears
from deft_policies.model.random_weights import openvla_7b
from deft_policies.model.sizes import TokenRange
from deft_policies.model.vla import OpenVLAModel, allocate
from scripts.bench.gpu.pi0fast import paligemma
from scripts.bench.gpu.vla0 import qwen

# A100; RTX 30; RTX 40; H100, H200; B200; RTX 50.
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
FIRST_WITH_FP8 = 89
WIDENING = (90, 100)  # as `FusedKernels.widens`
MOST_REGISTERS = 192  # of a thread
MOST_LOCAL_BYTES = 16  # of a thread: what did not fit into registers
MOST_SHARED_BYTES = 99 * 1024  # of a program: what the small GPUs have
# By how their name begins: architectures, registers and local bytes.
EXCEPTIONS = {
    # Only sm_80 and sm_90 have matrix instructions in float64; elsewhere the sums of attention are
    # made one by one.
    "attend": ((86, 89, 100, 120), 255, 168),
    "attend 256": ((86, 89, 100, 120), 255, 440),
    # Weights in four bits are read into registers.
    "product 64x64x128 IS_WHOLE WEIGHT_FIRST 4 bits": ((80, 86, 89, 120), 255, 16),
    "product 64x64x128 HAS_RESIDUAL IS_WHOLE WEIGHT_FIRST 4 bits": ((80, 86, 89, 120), 255, 16),
    # Where rows are not whole, numbers are loaded one by one.
    "product 128x128x64 HAS_BIAS": (ARCHITECTURES, 255, 16),
    "product 64x64x64 HAS_BIAS": (ARCHITECTURES, 255, 16),
}
_CPU, _FORMAT = torch.device("cpu"), torch.bfloat16
_PROMPT = 288  # positions, patches and padding among them
_COLUMNS = ("registers", "local bytes", "shared bytes", "2-byte loads")
_NOT_NAMED = {"NUM_HEADS", "NUM_KV_HEADS", "HEAD_DIM", "num_warps", "num_stages"}


@dataclass(frozen=True)
class Started:
    """A program with what it was started with."""

    program: Any
    grid: Grid
    arguments: Arguments
    constants: Constants

    @property
    def name(self) -> str:
        """Its own, with the constants that tell its uses apart."""
        left = {name: value for name, value in self.constants.items() if name not in _NOT_NAMED}
        name = self.program.fn.__name__
        if name.startswith("product"):
            flags = [
                one
                for one in ("HAS_BIAS", "HAS_RESIDUAL", "HAS_GELU", "IS_WHOLE", "WEIGHT_FIRST")
                if left.get(one)
            ]
            flags = flags if left["BITS"] == 16 else [*flags, f"{left['BITS']} bits"]
            return f"{name} {left['ROWS']}x{left['COLUMNS']}x{left['INNER']} {' '.join(flags)}"
        if name == "attend":
            whose = "a prompt's" if left["IS_PREFILL"] else "nodes'"
            size = self.constants["HEAD_DIM"]
            return f"attend {size}, {whose} {left['NUM_SPLITS']} splits {left['WORDS']} words"
        return " ".join((name, *(f"{one}={value}" for one, value in left.items())))


@dataclass(frozen=True)
class Compiled:
    """What the compiler and the assembler say of a program."""

    registers: int
    local_bytes: int
    shared_bytes: int
    narrow_loads: int  # of two bytes: where several numbers could not be loaded at once

    def excess(self, name: str, architecture: int) -> str:
        """In words, what is more than allowed; empty if nothing is."""
        registers, local_bytes = MOST_REGISTERS, MOST_LOCAL_BYTES
        for begins, (architectures, *most) in EXCEPTIONS.items():
            if name.startswith(begins) and architecture in architectures:
                registers, local_bytes = most
        found = (
            ("registers", self.registers, registers),
            ("local bytes", self.local_bytes, local_bytes),
            ("shared bytes", self.shared_bytes, MOST_SHARED_BYTES),
        )
        over = [f"{value} {what}, at most {limit}" for what, value, limit in found if value > limit]
        return "; ".join(over)


class _Target:
    """Stands where Triton looks for a device."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_device(self) -> int:
        """Programs are kept by device, so each architecture is one."""
        return self._architecture

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """With warps of 32."""
        return GPUTarget("cuda", self._architecture, 32)


@torch.inference_mode()
def started_programs(architecture: int) -> list[Started]:
    """Everything that a frame starts, the layers of one kind once. Nothing is computed."""
    found: list[Started] = []

    def note(program: Any, grid: Grid, arguments: Arguments, constants: Constants) -> None:
        found.append(Started(program, grid, arguments, constants))

    config = openvla_7b()
    few = replace(config.llm, num_layers=1), tuple(replace(one, depth=2) for one in config.towers)
    model = OpenVLAModel.empty(replace(config, llm=few[0], towers=few[1]), _CPU, _FORMAT)
    model.requires_grad_(False)
    size = config.image.size
    for of_towers in (None, OF_TOWERS):
        model.fuse(FusedKernels(note, of_towers=of_towers))
        model.see(torch.zeros(1, 3 * len(config.towers), size, size, dtype=_FORMAT))
    formats = [Quantization.NONE, Quantization.INT4, Quantization.FP8]
    for quantization in formats if architecture >= FIRST_WITH_FP8 else formats[:2]:
        layer = Layer(model.config.llm).to(_FORMAT).requires_grad_(False)
        quantize_linears(layer, quantization, torch.device("cuda"))
        model.decoder.layers[0] = layer
        for tiles in (TILES, WEIGHT_FIRST) if quantization is not Quantization.INT4 else (TILES,):
            model.fuse(FusedKernels(note, tiles, widens=architecture in WIDENING))
            _start_passes(model.decoder)
    for sizes in (paligemma("7b")[0].llm, qwen("7b").llm):  # of pi0-FAST; of VLA-0 and QwenFAST
        with torch.device("meta"):
            decoder = LlamaDecoder(replace(sizes, num_layers=1)).to(_FORMAT)
        allocate(decoder, _CPU)
        decoder.requires_grad_(False).kernels = FusedKernels(note)
        _start_passes(decoder)
    return found


def _start_passes(decoder: LlamaDecoder) -> None:
    """All that a server captures."""
    reserve = Reserve(shortest=_PROMPT, longest=_PROMPT)
    tokens = TokenRange(0, decoder.sizes.vocabulary - 1)
    target = Target(decoder, tokens, runner=StepRunner(reserve=reserve))
    passes = target.set_aside(target.new_cache(), WIDTHS[-1], num_tokens=8)
    assert passes is not None
    for keeps_hidden in (False, True):
        passes.keeps_hidden = keeps_hidden
        passes.capture()


def compile_for(architecture: int, programs: Sequence[Started]) -> Iterator[tuple[str, Compiled]]:
    """Each program once, with its name."""
    triton.runtime.driver.set_active(_Target(architecture))
    seen: set[str] = set()
    for one in programs:
        built = one.program.warmup(*one.arguments, grid=one.grid, **one.constants)
        if built.hash not in seen:
            seen.add(built.hash)
            ptx = built.asm["ptx"]
            narrow_loads = len(re.findall(r"ld\.global[\w.:]*\.b16 ", ptx))
            found = (*_assemble(architecture, ptx), built.metadata.shared, narrow_loads)
            yield one.name, Compiled(*found)


def _assemble(architecture: int, ptx: str) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "program.ptx"
        source.write_text(ptx)
        name = sm_arch_from_capability(architecture)
        command = [get_ptxas(architecture).path, "-v", f"--gpu-name={name}", str(source)]
        command += ["-o", str(Path(folder) / "program.cubin")]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    local_bytes = re.search(r"(\d+) bytes stack frame", report)
    if registers is None or local_bytes is None:
        raise RuntimeError(f"ptxas said nothing of registers or the stack: {report!r}")
    return int(registers[1]), int(local_bytes[1])


def main(arguments: list[str]) -> int:
    """Print a table for each architecture; 1 where a program takes more than it may."""
    parser = ArgumentParser(prog="python -m scripts.compile_kernels", description=__doc__)
    parser.add_argument("architecture", type=int, nargs="*", default=ARCHITECTURES)
    complaints = []
    print(f"Triton {triton.__version__}")
    for architecture in parser.parse_args(arguments).architecture:
        rows, programs = [], started_programs(architecture)
        for name, found in compile_for(architecture, programs):
            rows.append([name, *map(str, astuple(found))])
            if excess := found.excess(name, architecture):
                complaints.append(f"sm_{architecture}, {name}: {excess}")
        columns = [f"sm_{architecture}", *_COLUMNS]
        print(f"\n{markdown_table(columns, rows, aligned=True)}", end="")
    print("\n".join(complaints))
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
