"""The last evaluation: plays what a committed plan lists, on initial states that are held out.

They say something only of a policy that was chosen without them. So the plan and the ledger of
looks must be committed before the first episode, what is served must be what the plan names, and
whoever plays a cell again gets results that say which look they are of.
"""

import argparse
import json
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from deft_client import PolicyClient
from deft_client.commands.program import CommandParser
from deft_client.files import write_atomically
from deft_client.libero.results.store import load_runs
from deft_policies.commands.parse import run_command
from scripts.local_server import local_server
from scripts.reproduce.study import STRICT, ReproductionError, read_toml

PROG = "python -m scripts.reproduce final"
PLAN = Path("docs/results/final.toml")
LEDGER = ".looks.jsonl"  # beside the plan, in place of its suffix
_ID = "look.txt"  # in the folder of results: which look they are of


@dataclass(frozen=True)
class Cell:
    """A run: flags of `deft serve` and of `deft-client eval`, and what else must be served."""

    __pydantic_config__ = STRICT
    name: str
    serve: str
    eval: str
    served: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The cells, and what the details of /v1/info must say in all of them."""

    __pydantic_config__ = STRICT
    path: Path
    served: Mapping[str, str]
    cell: tuple[Cell, ...]


def load_plan(path: Path) -> Plan:
    """Read a plan; `ReproductionError` says which field of it is wrong."""
    return read_toml(Plan, path, "plan", path=path)


@dataclass(frozen=True)
class Look:
    """A line of the ledger: the results of one folder are the `number`th look at a cell."""

    look: str
    cell: str
    number: int


def require_committed(path: Path) -> None:
    """Raise `ReproductionError` unless git has the file as it is."""
    is_tracked = _git(path, "ls-files", "--error-unmatch") is not None
    if not is_tracked or _git(path, "status", "--porcelain"):
        raise ReproductionError(
            f"{path} is not committed as it is. Held-out states are played by a plan, and noted in "
            "a ledger, that cannot change afterwards: commit it and give the same command again"
        )


def _git(path: Path, *words: str) -> str | None:
    """What git says of a file; None where it refuses."""
    ended = subprocess.run(
        ["git", *words, "--", path.name],
        cwd=path.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return ended.stdout.strip() if ended.returncode == 0 else None


def note_looks(plan: Plan, cells: Iterable[Cell], out: Path) -> dict[str, int]:
    """Which look each cell is, by its name; new ones are added to the ledger.

    A folder of results is one look at a cell, however often it goes on.
    """
    ledger, look = plan.path.with_suffix(LEDGER), _look_of(out)
    known = _read_ledger(ledger)
    for cell in cells:
        earlier = [one for one in known if one.cell == cell.name]
        if look not in [one.look for one in earlier]:
            known.append(Look(look, cell.name, len(earlier) + 1))
    lines = "".join(json.dumps(vars(one)) + "\n" for one in known)
    write_atomically(ledger, lines.encode())
    return {one.cell: one.number for one in known if one.look == look}


def _read_ledger(path: Path) -> list[Look]:
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    try:
        return [Look(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise ReproductionError(f"{path} has a line that is no look: {error}") from error


def _look_of(out: Path) -> str:
    path = out / _ID
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{uuid.uuid4().hex[:12]}\n".encode())
    return path.read_text().strip()


def require_served(details: Mapping[str, str], plan: Plan, cell: Cell) -> None:
    """Raise `ReproductionError` where the server's details are not the plan's."""
    for name, wanted in {**plan.served, **cell.served}.items():
        if (found := details.get(name, "nothing")) != wanted:
            raise ReproductionError(
                f"{plan.path} is a plan for {name} {wanted}, but the server of cell {cell.name} "
                f"has {found}. Nothing was played"
            )


def play(plan: Plan, cells: Sequence[Cell], out: Path, num_workers: int) -> None:
    """Play what is missing; raises `ReproductionError`, nearly always before the first episode."""
    require_committed(plan.path)
    looks = note_looks(plan, cells, out)
    require_committed(plan.path.with_suffix(LEDGER))
    for index, cell in enumerate(cells):
        left_s = _seconds_a_run(out) * (len(cells) - index) / num_workers if index else 0.0
        left = f", about {left_s / 60:.0f} min to go" if index else ""
        _say(f"{cell.name}, cell {index + 1} of {len(cells)}: look {looks[cell.name]}{left}")
        with local_server(*shlex.split(cell.serve)) as url:
            with PolicyClient(url) as client:
                require_served(client.info().details, plan, cell)
            _evaluate(cell, url, out, looks[cell.name], num_workers)
    _say(f"next: deft-client report {out}; {PROG.removesuffix(' final')} --pack {out}")


def _seconds_a_run(out: Path) -> float:
    """What one of its runs has taken on average, by one worker."""
    return fmean(sum(record.wall_s for record in run.records) for run in load_runs(out))


def _evaluate(cell: Cell, url: str, out: Path, look: int, num_workers: int) -> None:
    command = [
        *(sys.executable, "-m", "deft_client", "eval", *shlex.split(cell.eval), "--url", url),
        *("--final", str(look), "--workers", str(num_workers), "--out", str(out)),
    ]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise ReproductionError(f"{cell.name} ended with {code}; the same command goes on")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main(arguments: list[str]) -> int:
    """Play the plan; return the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.workers < 1:
        parser.error(f"--workers must be at least 1, got {given.workers}")

    def run() -> int:
        plan = load_plan(given.plan)
        names = [cell.name for cell in plan.cell]
        if unknown := sorted(set(given.cells) - set(names)):
            raise ReproductionError(f"no cell {unknown[0]!r}; the plan has {', '.join(names)}")
        asked = [cell for cell in plan.cell if cell.name in (given.cells or names)]
        play(plan, asked, given.out, given.workers)
        return 0

    return run_command(PROG, run)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        PROG,
        description="Play what a committed plan lists, on initial states that are held out. A "
        "killed run goes on with the same command; another --out is another look, and its results "
        "say so.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--plan", type=Path, default=PLAN, metavar="FILE", help="(default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    parser.add_argument(
        "--cells", nargs="+", default=[], metavar="NAME", help="of the plan (default: all)"
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N",
        help="episodes at the same time (default: %(default)s)",
    )  # fmt: skip
    return parser
