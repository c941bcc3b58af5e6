"""One short run on a GPU: what decides the next piece of work comes first.

`python -m scripts.bench gpu --out DIR` asks the questions below in order, until its seconds are
over; each has a budget, and is skipped if less is left. After each a line is in DIR/gpu_run.jsonl
and its table on the terminal, and all tables come again at the end. `--resume` goes on where a run
was cut off, `--only products,bits` picks.

Weights are random and drafts scripted, since speed does not depend on values.

In a clone nothing of Deft has to be installed: `PYTHONPATH=client:policies` finds it. Besides it
takes PyTorch for CUDA (with its Triton), numpy, pillow, msgpack, safetensors, tokenizers, tqdm and,
for one question, transformers; where pip works, `pip install ./client '.[models]' transformers`.

A further question is a function that takes a `Setting` and yields rows, and a line of `QUESTIONS`.
"""

import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deft_core.program import CommandParser
from deft_policies.commands.parse import run_command
from deft_policies.families.family import choose_device
from deft_policies.model.graphs import Capture
from scripts.bench.gpu import formats, frames, heads, passes, pi0fast, products, server, vla0
from scripts.bench.gpu.asking import Question, Row, Run, describe_tree
from scripts.bench.gpu.setting import SIZES, Setting

PROG = "python -m scripts.bench gpu"
# In the order of what they decide. Profiles come behind the frames that they might slow down.
QUESTIONS: tuple[tuple[str, float, Callable[[Setting], Iterator[Row]]], ...] = (
    ("ceilings", 5, products.ceilings),
    ("weights", 10, products.weights),
    ("products", 15, products.products),
    ("bits", 40, passes.bits),
    ("passes", 25, passes.passes),
    ("frames", 30, frames.frames),
    ("weight-first", 60, formats.weight_first),
    ("towers", 10, formats.towers),
    ("kernels", 15, passes.kernels),
    ("host", 10, frames.host),
    ("transformers", 20, frames.transformers),
    ("server", 25, server.server),
    ("batches", 40, frames.batches),
    ("heads", 10, heads.heads),
    ("vla0", 25, vla0.vla0),
    ("pi0-fast", 20, pi0fast.pi0fast),
    ("text", 20, frames.text),
    ("small-bits", 45, passes.small_bits),
    ("fp8", 55, formats.fp8),
    ("int4", 40, formats.int4),
)


def main(arguments: list[str], capture: Capture | None = None) -> int:
    """Ask and print; `capture` stands in for CUDA's graphs. Returns the exit code."""
    parser = CommandParser(prog=PROG, description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for lines, traces")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all questions together")
    known = [name for name, _, _ in QUESTIONS]
    parser.add_argument("--only", type=partial(_names, known), default=known, metavar="A,B")
    parser.add_argument("--resume", action="store_true", help="leave out what is answered")
    parser.add_argument("--device", help="cuda, or cpu to try the script itself")
    parser.add_argument("--size", choices=list(SIZES), default="7b")
    parser.add_argument("--commit", help="of files that were copied without their repository")

    def run() -> int:
        given = parser.parse_args(arguments)
        setting = Setting(SIZES[given.size], choose_device(given.device), given.out, capture)
        tree = describe_tree()
        tree["commit"] = given.commit or tree["commit"]
        asked = Run(given.out, given.seconds, setting.describe() | _versions() | tree)
        if given.resume:
            asked.resume()
        questions = [
            Question(name, seconds, partial(ask, setting))
            for name, seconds, ask in QUESTIONS
            if name in given.only
        ]
        return asked.ask(questions, setting)

    return run_command(PROG, run)


def _names(known: Sequence[str], text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def _versions() -> Row:
    found: Row = {"python": sys.version.split()[0]}
    for name in ("triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
