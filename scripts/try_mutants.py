"""Break the code in one place at a time and count how often a test notices.

    python -m scripts.try_mutants [--each 40] [--room ROOM ...] [--out FILE]

Mutants are drawn with a fixed seed from the syntax trees of the rooms below and written into a
copy of the repository, never into the working tree. The tests that mirror the mutant's module run
until one fails, or until they take three times as long as they do over the original. What is in
the file of results is not tried again unless the module or its tests have changed: a run that was
cut off goes on where it was, and a longer one begins with what a shorter one tried. Survivors are
listed: either a test is missing, or the mutant means the same as the original.
"""

import argparse
import ast
import contextlib
import copy
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Patterns, so that files may be renamed, split and joined; each room has at least one file.
ROOMS = {
    "acceptance": ("policies/deft_policies/decoding/accept*", "policies/*/decoding/accept*/*"),
    "rounds": (
        "policies/deft_policies/decoding/round*",
        "policies/deft_policies/decoding/judge*",
        "policies/deft_policies/decoding/batch*",
    ),
    "drafts": (
        "policies/deft_policies/decoding/drafts/*",
        "policies/deft_policies/decoding/tree*",
    ),
    "sessions": ("server/deft_server/serving/*session*",),
    "serving": ("server/deft_server/serving/*",),
    "codecs": ("client/deft_client/wire/*",),
    "limits": ("client/deft_client/actions*", "client/deft_client/settings*"),
}
SLACK_S = 30.0


@dataclass(frozen=True)
class Mutant:
    """One change of one module; `number` counts the places where its operator applies."""

    inputs: str  # a digest of the module and its tests: when they change it is tried again
    room: str
    module: str
    operator: str
    number: int
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class Result:
    """What became of a mutant: killed, hung (which is as good) or survived."""

    mutant: Mutant
    verdict: str
    seconds: float


# What takes a node's place, and None where an operator does not apply; the node stays as it is.
Change = Callable[[ast.AST], ast.AST | None]

NEGATED = {
    **{ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn},
    ast.NotIn: ast.In,
}
NEIGHBOUR = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPPOSITE = {ast.Add: ast.Sub, ast.Sub: ast.Add}
SYMMETRIC = {"min", "max", "isinstance", "issubclass", "zip"}


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """A node like another, but for some fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _compare(table: dict[type[ast.cmpop], type[ast.cmpop]]) -> Change:
    def change(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.Compare) and type(node.ops[0]) in table:
            return _with(node, ops=[table[type(node.ops[0])](), *node.ops[1:]])
        return None

    return change


def _plus_minus(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPPOSITE:
        return _with(node, op=OPPOSITE[type(node.op)]())
    return None


def _and_or(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.BoolOp):
        return _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    return None


def _drop_not(node: ast.AST) -> ast.AST | None:
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return node.operand if is_not else None


def _one_more(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _with(node, value=node.value + 1)
    return None


def _swap_arguments(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return None
    first, second, *others = node.args
    if isinstance(first, ast.Starred) or isinstance(second, ast.Starred):
        return None
    if isinstance(node.func, ast.Name) and node.func.id in SYMMETRIC:
        return None
    return _with(node, args=[second, first, *others])


def _drop_statement(node: ast.AST) -> ast.AST | None:
    """Calls, raises and assignments to fields; without a local name Python itself would fail."""
    is_call = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    is_field = isinstance(node, ast.Assign) and not any(
        isinstance(one, ast.Name | ast.Tuple) for one in node.targets
    )
    if is_call or is_field or isinstance(node, ast.Raise | ast.AugAssign):
        return ast.Pass()
    return None


def _return_early(node: ast.AST) -> ast.AST | None:
    """Half way through a function, where None is what it returns anyway."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
        return None
    if not isinstance(node.returns, ast.Constant):
        return None
    return _with(node, body=[*node.body[: len(node.body) // 2], ast.Return(None)])


OPERATORS: dict[str, Change] = {
    "flip a comparison": _compare(NEGATED),
    "move a boundary": _compare(NEIGHBOUR),
    "plus or minus": _plus_minus,
    "and or or": _and_or,
    "drop a not": _drop_not,
    "one more": _one_more,
    "swap arguments": _swap_arguments,
    "drop a statement": _drop_statement,
    "return early": _return_early,
}


@dataclass(frozen=True)
class Place:
    """Where a node is: in a field of its parent, for a list at an index."""

    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST

    def put(self, node: ast.AST) -> None:
        value = getattr(self.parent, self.field)
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            value[self.index] = node


def _places(tree: ast.AST) -> Iterator[Place]:
    """Every node below another, without annotations and what only type checkers read."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns"):
            continue
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(node, ast.AST):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            yield Place(tree, field, index if isinstance(value, list) else None, node)
            yield from _places(node)


def _changes(tree: ast.Module, operator: str) -> Iterator[tuple[Place, ast.AST]]:
    """Where an operator applies, and what it puts there."""
    for place in _places(tree):
        put = OPERATORS[operator](place.node)
        if put is not None and ast.dump(put) != ast.dump(place.node):
            yield place, put


def mutants_of(room: str, module: str) -> Iterator[Mutant]:
    """Every mutant of a module."""
    files = [(ROOT / name).read_bytes() for name in (module, *mirrored_tests(module))]
    inputs = hashlib.sha256(b"".join(files)).hexdigest()[:16]
    tree = ast.parse(files[0])
    for operator in OPERATORS:
        for number, (place, put) in enumerate(_changes(tree, operator)):
            before, after = (ast.unparse(one).strip() for one in (place.node, put))
            line = getattr(place.node, "lineno", 0)
            shown = _short(before), _short(after)
            yield Mutant(inputs, room, module, operator, number, line, *shown)


def _short(text: str) -> str:
    """The end of long code: what is left out of a function is there."""
    return text if len(text) <= 120 else f"... {text[-116:]}"


def mutate(source: str, mutant: Mutant) -> str:
    """The source of a module with the change of a mutant."""
    tree = ast.parse(source)
    place, put = list(_changes(tree, mutant.operator))[mutant.number]
    place.put(put)
    return ast.unparse(ast.fix_missing_locations(tree))


def modules_of(room: str) -> list[str]:
    """Modules that match a room's patterns and no earlier room's."""
    found: dict[str, list[str]] = {}
    for name, patterns in ROOMS.items():
        taken = {module for modules in found.values() for module in modules}
        paths = {path for pattern in patterns for path in ROOT.glob(pattern)}
        names = {path.relative_to(ROOT).as_posix() for path in paths if path.suffix == ".py"}
        found[name] = sorted(names - taken)
        if not found[name]:
            raise SystemExit(f"no file matches {' or '.join(patterns)}: mend ROOMS")
    return found[room]


def draw(room: str, count: int, seed: int) -> list[Mutant]:
    """Some mutants of a room, as many of each operator as there are."""
    rng = random.Random(f"{seed} {room}")
    piles: dict[str, list[Mutant]] = defaultdict(list)
    for module in modules_of(room):
        for mutant in mutants_of(room, module):
            piles[mutant.operator].append(mutant)
    for pile in piles.values():
        rng.shuffle(pile)
    turns = itertools.zip_longest(*piles.values())
    return [mutant for turn in turns for mutant in turn if mutant is not None][:count]


def mirrored_tests(module: str) -> list[str]:
    """Test files named after a module, those that import it, the rest of the folder it mirrors.

    In this order: the first ones notice most.
    """
    package, _, *folders, file = module.split("/")
    stem = file.removesuffix(".py")
    folder = ROOT.joinpath("tests", package, *folders)
    dotted = module.removesuffix(".py").partition("/")[2].replace("/", ".")
    named = sorted((ROOT / "tests" / package).rglob(f"test_{stem}.py"))
    beside = sorted(folder.glob("test_*.py"))
    every = sorted((ROOT / "tests" / package).rglob("test_*.py"))
    importing = [path for path in every if f"{dotted} " in path.read_text()]
    # A package's own folder holds the tests of everything; a room's folder those of the room.
    rest = beside if folders else []
    paths = dict.fromkeys((*named, *importing, *rest))
    if not paths:
        raise SystemExit(f"no test names, imports or mirrors {module}")
    return [path.relative_to(ROOT).as_posix() for path in paths]


class Copy:
    """A copy of the repository's files in which modules are changed and tests run."""

    def __init__(self, root: Path, folder: Path) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        self._folder = folder
        self._limits_s: dict[frozenset[str], float] = {}

    def try_out(self, mutant: Mutant) -> Result:
        """Run the tests over a mutant."""
        tests = mirrored_tests(mutant.module)
        limit_s = self._limit_s(frozenset(tests))
        path = self._folder / mutant.module
        source = path.read_text()
        began = time.monotonic()
        try:
            self._write(path, mutate(source, mutant))
            code = self._pytest(tests, limit_s)
        finally:
            self._write(path, source)
        verdict = "hung" if code is None else "survived" if code == 0 else "killed"
        return Result(mutant, verdict, round(time.monotonic() - began, 1))

    def _write(self, path: Path, source: str) -> None:
        """Bytecode goes by size and second: a mutant may have both in common with another."""
        shutil.rmtree(path.with_name("__pycache__"), ignore_errors=True)
        path.write_text(source)

    def _limit_s(self, tests: frozenset[str]) -> float:
        """Three times what the tests take over the original, which has to pass them."""
        if tests not in self._limits_s:
            began = time.monotonic()
            if self._pytest(sorted(tests), 3600) != 0:
                raise SystemExit(f"fails without any mutant: {' '.join(sorted(tests))}")
            self._limits_s[tests] = 3 * (time.monotonic() - began) + SLACK_S
        return self._limits_s[tests]

    def _pytest(self, tests: list[str], limit_s: float) -> int | None:
        """The exit code, or None after the limit."""
        packages = ("client", "policies", "server", "draft_training", ".")
        path = os.pathsep.join(str(self._folder / one) for one in packages)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        running = subprocess.Popen(
            command,
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return running.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()


def report(results: list[Result]) -> str:
    """The kill rate of each room and the survivors."""
    lines = ["room         killed  tried   rate"]
    for room in (*ROOMS, "all"):
        verdicts = [one.verdict for one in results if room in (one.mutant.room, "all")]
        if verdicts:
            killed = len(verdicts) - verdicts.count("survived")
            lines.append(f"{room:12} {killed:6} {len(verdicts):6} {killed / len(verdicts):6.1%}")
    for one in results:
        if one.verdict == "survived":
            mutant = one.mutant
            lines.append(f"survived {mutant.module}:{mutant.line}, {mutant.operator}")
            lines += [f"  - {mutant.before}", f"  + {mutant.after}"]
    return "\n".join(lines)


def read_results(path: Path) -> dict[Mutant, Result]:
    """What a file of results holds, but for a line that was cut off."""
    results = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            fields = json.loads(line)
            mutant = Mutant(**fields["mutant"])
            results[mutant] = Result(mutant, fields["verdict"], fields["seconds"])
    return results


def main(arguments: list[str]) -> int:
    """Try the mutants that were not tried before; print the table."""
    parser = argparse.ArgumentParser(
        "try_mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--each", type=int, default=40, help="mutants of each room")
    parser.add_argument("--room", choices=ROOMS, action="append", help="default: all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "mutants.jsonl")
    asked = parser.parse_args(arguments)
    rooms = [draw(room, asked.each, asked.seed) for room in asked.room or ROOMS]
    mutants = [one for turn in itertools.zip_longest(*rooms) for one in turn if one is not None]
    known = read_results(asked.out)
    todo = [one for one in mutants if one not in known]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, asked.out.open("a") as out:
        out.write("\n")  # ends a line that was cut off
        tree = Copy(ROOT, Path(folder))
        for count, mutant in enumerate(todo, 1):
            known[mutant] = result = tree.try_out(mutant)
            out.write(json.dumps(asdict(result)) + "\n")
            out.flush()
            left_min = (time.monotonic() - began) / count * (len(todo) - count) / 60
            print(
                f"{count}/{len(todo)} {result.verdict} in {result.seconds:.0f} s, about "
                f"{left_min:.0f} min left: {mutant.module}:{mutant.line} {mutant.operator}",
                flush=True,
            )
    print(report([known[one] for one in mutants]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
