"""The instructions by which weights in few bits become bfloat16, one by one, for every byte.

Triton's interpreter runs none of them, and multiplies no bfloat16.
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch

from deft_policies.model.quantization import FP8

SOURCE = Path(__file__).parents[3] / "policies/deft_policies/model/kernels/programs.py"
BLOCK = re.compile(
    r'def (\w+)\([^)]*\)(?:(?!\ndef ).)*?inline_asm_elementwise\(\s*"""(.*?)"""', re.S
)


def both_halves(work: Callable[[torch.Tensor], torch.Tensor], *words: int) -> int:
    """What some work on bfloat16 makes of two numbers in each word."""
    halves = [[word & 0xFFFF, word >> 16] for word in words]
    numbers = torch.tensor(halves, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    low, high = work(numbers.double()).bfloat16().view(torch.int16).tolist()
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def run(instructions: str, **registers: int) -> dict[str, int]:
    """The registers after these instructions."""

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    def execute(operation: str, given: list[int]) -> int:
        match operation:
            case "mov.b32":
                return given[0]
            case "and.b32":
                return given[0] & given[1]
            case "shr.u32":
                return given[0] >> given[1]
            case "prmt.b32":
                first, second, order = given
                every = first.to_bytes(4, "little") + second.to_bytes(4, "little")
                return int.from_bytes((every[order >> 4 * i & 7] for i in range(4)), "little")
            case "lop3.b32":
                *words, table = given
                rows = [
                    sum((word >> bit & 1) << 2 - i for i, word in enumerate(words))
                    for bit in range(32)
                ]
                return sum((table >> row & 1) << bit for bit, row in enumerate(rows))
            case "fma.rn.bf16x2":
                return both_halves(lambda numbers: numbers[0] * numbers[1] + numbers[2], *given)
        raise AssertionError(operation)

    for line in re.findall(r"[a-z][\w.]+ [^;{}]+(?=;)", instructions):
        operation, _, operands = line.partition(" ")
        if not operation.startswith("reg"):
            target, *names = re.split(r",\s*", operands)
            registers[target] = execute(operation, [value(name) for name in names])
    return registers


def converted(program: str, word: int, num_outputs: int) -> list[float]:
    """The numbers that a program makes of four bytes."""
    instructions = dict(BLOCK.findall(SOURCE.read_text()))[program].replace("$", "r")
    registers = run(instructions, **{f"r{num_outputs}": word})
    words = [registers[f"r{index}"] for index in range(num_outputs)]
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    bits = torch.tensor(halves, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).tolist()


def words_of_all_bytes() -> list[tuple[int, list[int]]]:
    """Every byte once, four in a word."""
    every = [list(range(first, first + 4)) for first in range(0, 256, 4)]
    return [(int.from_bytes(four, "little"), four) for four in every]


def test_bytes_in_fp8_become_the_numbers_that_they_are() -> None:
    for word, four in words_of_all_bytes():
        expected = torch.tensor(four, dtype=torch.uint8).view(FP8).float()
        found = torch.tensor(converted("_wide_weights", word, 2))
        is_number = expected.isfinite()  # no weight is anything else
        assert torch.equal(found[is_number], expected[is_number])
        assert torch.equal(found.signbit(), expected.signbit())


def test_bytes_of_two_weights_in_four_bits_are_taken_apart() -> None:
    for word, four in words_of_all_bytes():
        expected = [(one & 15) - 8 for one in four] + [(one >> 4) - 8 for one in four]
        assert converted("_two_of_a_byte", word, 4) == expected
