"""`deft train export`: writes a fitted head as the server loads it, reads it back and compares."""

from pathlib import Path

from deft_core.program import CommandParser
from deft_draft_training.commands.target import parse_target
from deft_draft_training.errors import DataError, TrainingError


def main(arguments: list[str]) -> int:
    """Write a head; return the exit code."""
    parser = CommandParser(prog="deft train export", description=__doc__)
    parser.add_argument("run", type=Path, help="run directory of `deft train fit`")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    parser.add_argument("--layout", choices=["safetensors", "published"], default="safetensors")
    parser.add_argument("--float32", action="store_true", help="instead of bfloat16")
    flags = parse_target(parser, arguments)
    if not flags.run.is_dir():
        raise DataError(f"{flags.run}: no such directory; `deft train fit` writes one")
    if flags.out.exists():
        raise TrainingError(f"{flags.out} exists; an export never overwrites, choose another")
    from deft_draft_training.heads.export import run  # brings torch along

    return run(flags)
