"""`deft bench`: replay observations through a policy and print where the time goes.

What is asked for is read and checked here, without torch; `run` does it.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from deft_core.datasets.flags import add_camera_flag
from deft_core.datasets.formats import find_format
from deft_core.methods import method_text
from deft_core.program import CommandParser
from deft_policies.commands.parse import PolicyCommand, parse_command, run_command
from deft_policies.decoding.methods import AUTOREGRESSIVE, find_method
from deft_policies.errors import PolicyError

if TYPE_CHECKING:
    from deft_policies.benchmark.replay import Contender, ReplayFrame
    from deft_policies.families.policy import VlaPolicy

    # Contenders other than the methods, and the name of the baseline.
    Others = tuple[list[Contender], str]
    FindOthers = Callable[[Namespace, VlaPolicy, Sequence[ReplayFrame]], Others]

PROG = "deft bench"


@dataclass(frozen=True)
class BenchRequest:
    """A parsed command line: the policy, and what is to answer at which radii."""

    command: PolicyCommand
    methods: list[str]
    radii: list[int]


def build_parser() -> ArgumentParser:
    """Declare the flags."""
    parser = CommandParser(
        prog=PROG,
        allow_abbrev=False,
        description="Replay observations through a policy; where the time goes, and how far from "
        "this device's limits.",
    )
    parser.add_argument("--frames", type=int, default=50, metavar="N", help="how many at most")
    parser.add_argument("--warm-ups", type=int, default=3, metavar="N", help="not counted")
    parser.add_argument(
        "--batch", type=_sizes, default="1", metavar="N[,N...]", help="observations per call"
    )
    parser.add_argument(
        "--recording",
        type=Path,
        metavar="DATA",
        help="replay a data set's episodes (recordings, LeRobot, ...); default: of tiny-libero "
        "frames that were recorded and ship, of others frames that are generated",
    )
    add_camera_flag(parser)
    parser.add_argument("--input", type=Path, metavar="JSONL", help="replay pictures, as deft act")
    parser.add_argument(
        "--audit",
        action="store_true",
        help="list every token that differs between bfloat16 (or --quantization) and float32, and "
        "every answer of an exact method that is not plain decoding's",
    )
    parser.add_argument(
        "--reasoning",
        action="store_true",
        help="have a policy reason before it acts, where it can",
    )
    parser.add_argument(
        "--against",
        choices=["transformers"],
        help="also run transformers' own model of the same weights on the same frames, in turn; "
        "speed-ups are over its generate()",
    )
    parser.add_argument(
        "--stages",
        action="store_true",
        help="also print the time of each stage with this device's limits, and accepted lengths "
        "by position",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there too")
    return parser


def split_sweep(arguments: Sequence[str]) -> tuple[list[str], list[str], list[int]]:
    """Take every `--decoding` and `--radius` out, so that several may be given; others stay."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--decoding", action="append", type=method_text, default=[])
    parser.add_argument("--radius", action="append", type=int, default=[])
    flags, rest = parser.parse_known_args(list(arguments))
    return rest, list(dict.fromkeys(flags.decoding)), list(dict.fromkeys(flags.radius))


def main(arguments: list[str]) -> int:
    """Replay a benchmark; return the exit code: 1 where the audit found a fault."""
    return bench(build_parser(), arguments)


def bench(
    parser: ArgumentParser, arguments: list[str], find_others: FindOthers | None = None
) -> int:
    """The same with a parser that may know more flags, and with whom these add."""

    def run() -> int:
        request = read_request(parser, arguments)
        from deft_policies.benchmark.run import run_benchmark  # brings torch along

        return run_benchmark(request, find_others or find_rivals)

    return run_command(PROG, run)


def read_request(parser: ArgumentParser, arguments: list[str]) -> BenchRequest:
    """Read a command line, and refuse what cannot be done before anything is loaded."""
    rest, methods, radii = split_sweep(arguments)
    command = parse_command(parser, rest)
    flags = command.namespace
    if flags.frames < 1 or flags.warm_ups < 0 or min(flags.batch) < 1:
        parser.error("--frames and --batch must be 1 or more, --warm-ups 0 or more")
    if flags.recording is not None and flags.input is not None:
        parser.error("give --recording or --input, not both")
    for text in methods:
        find_method(text)
    if flags.against is not None and find_spec(flags.against) is None:
        raise PolicyError(
            f"--against {flags.against}: it is not installed; in a clone of Deft, "
            f"pip install ./client '.[{flags.against}]'"
        )
    if flags.recording is not None:
        find_format(flags.recording)
    if flags.input is not None and not flags.input.is_file():
        raise PolicyError(f"--input {flags.input}: no such file")
    return BenchRequest(command, methods, radii)


def find_rivals(flags: Namespace, policy: VlaPolicy, frames: Sequence[ReplayFrame]) -> Others:
    """Return who `--against` adds, and the name of the baseline."""
    if flags.against is None:
        return [], AUTOREGRESSIVE
    from deft_policies.benchmark.transformers_loops import find_loops

    return find_loops(policy)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
