"""The tables and figures of the papers, on one engine, from recorded lines."""

import argparse
import json
import math
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote

import numpy as np
from PIL import Image

from deft_core.datasets.flags import add_camera_flag, read_cameras
from deft_core.files import write_atomically
from deft_core.program import CommandParser, distribution_version
from deft_policies.commands.parse import parse_command, run_command, target_flags
from deft_policies.decoding.methods import DEFAULT_METHOD
from scripts.reproduce.choices import record_choices
from scripts.reproduce.listing import list_tables
from scripts.reproduce.page import (
    FACTS,
    PAGE,
    STRIP,
    STUDIES,
    ResultsFolder,
    check,
    pack,
    unpack,
    write,
)
from scripts.reproduce.played import Played
from scripts.reproduce.record import FrameSet, PolicyWords, Replays
from scripts.reproduce.study import (
    FOLDER,
    SUFFIX,
    ReproductionError,
    Row,
    Study,
    distinct,
    load_study,
    study_names,
)

PROG = "python -m scripts.reproduce"
ALL = "all"
ROOT = Path(__file__).parents[2]
_STRIP_FRAMES = 6
_QUICK_EPISODES, _QUICK_TIMES = 1, 10
_QUICK_FRAMES = 60
_STEPS_PER_EPISODE = 60  # an episode has more, so that there are frames enough


def main(arguments: list[str]) -> int:
    """Record what is missing and write the page; or check one. Returns the exit code."""
    parser = _parser()

    def run() -> int:
        command = parse_command(parser, arguments)
        given = command.namespace
        words = PolicyWords(given.policy, tuple(shlex.split(target_flags(given))))
        if given.list:
            sys.stdout.write(list_tables())
            return 0
        if given.write is not None:
            write(given.write)
            return 0
        if given.pack is not None:
            pack(given.pack)
            return 0
        if given.check is not None:
            found = check(given.check)
            said = "\n".join(found) if found else f"{given.check}: as its lines say"
            sys.stdout.write(f"{said}\n")
            return 1 if found else 0
        if not given.studies:
            parser.error(f"name a STUDY/TABLE (--list has them), {ALL}, --check, --write or --pack")
        return _reproduce(given, words)

    return run_command(PROG, run)


def _parser() -> argparse.ArgumentParser:
    names = study_names()
    parser = CommandParser(
        PROG,
        description="Run a paper's comparison on one engine, print the tables that are named and "
        "write a page with tables and plots. The same command resumes. Default: the small policy "
        "that ships; --checkpoint DIR takes your own.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "studies",
        nargs="*",
        metavar="STUDY[/TABLE]",
        help=f"{', '.join(names)} or {ALL}; or the path of a study of your own, MINE{SUFFIX}",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the tables, what they show, and minutes"
    )
    parser.add_argument(
        "--row", action="append", default=[], metavar="NAME",
        help="this row alone, and plain decoding; may be repeated",
    )  # fmt: skip
    parser.add_argument("--check", type=Path, metavar="PAGE|DIR", help="derive its numbers again")
    parser.add_argument("--write", type=Path, metavar="PAGE|DIR", help="write them from the lines")
    parser.add_argument("--pack", type=Path, metavar="DIR", help="its lines in one file of each "
                        "kind, as they are committed; runs that go on unpack them")  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("results/reproduced"), metavar="DIR",
        help="lines, page and plots (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few frames and episodes: the shapes")
    group = parser.add_argument_group("frames that every row answers")
    group.add_argument("--recording", type=Path, metavar="DATA", help="a data set of held-out "
                       "episodes (default: what plain decoding sees, played now)")  # fmt: skip
    add_camera_flag(group)  # type: ignore[arg-type]
    group.add_argument("--frames", type=int, metavar="N", help="(default: 2,000; --quick: 60)")
    group.add_argument(
        "--time", type=int, metavar="N",
        help="take times, too: N frames of at least five episodes, one at a time, rows in turn, on "
        "a machine that does nothing else (default: none; --quick: 10)",
    )  # fmt: skip
    group = parser.add_argument_group("episodes of the rows that are played in closed loop")
    group.add_argument("--no-episodes", action="store_true", help="replay frames alone")
    group.add_argument("--suite", default="libero_object", help="(default: %(default)s)")
    group.add_argument("--tasks", default="trained", help="as `deft-client eval`")
    group.add_argument("--trials", default="40-49", help="(default: %(default)s)")
    group.add_argument("--assets", metavar="FOLDER", help="as `deft-client eval`")
    group.add_argument("--workers", default="1", metavar="N", help="(default: %(default)s)")
    group.add_argument("--ray", metavar="ADDRESS", help="as `deft-client eval`; with --host where "
                       "the cluster has other machines")  # fmt: skip
    group.add_argument("--host", metavar="ADDRESS", help="of this machine, as workers elsewhere "
                       "reach it; meanwhile anyone else who does may ask, too")  # fmt: skip
    return parser


def refuse_changed_sources(out: Path, root: Path = ROOT) -> None:
    """Lines below `docs` are published, so a commit must hold the code that made them.

    Raises `ReproductionError`. What is recorded elsewhere says that it was a changed tree.
    """
    if not out.resolve().is_relative_to(root / "docs"):
        return
    told = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    changed = [line[3:] for line in told.stdout.splitlines()]
    if changed:
        raise ReproductionError(
            f"{out}: pages are recorded from a commit alone, and {changed[0]} was changed since; "
            "commit it, or give another --out"
        )


def _reproduce(given: argparse.Namespace, words: PolicyWords) -> int:
    out: Path = given.out
    refuse_changed_sources(out)
    _refuse_unused(given)
    asked = [split_study(text) for text in given.studies]
    studies = _load([name for name, _ in asked], out)
    rows = _rows(given, studies, [key for _, key in asked])
    unpack(out)
    episodes = Played(words, out, given.suite, _evaluation_flags(given), given.host)
    frames = _frames(given, studies[0], episodes)
    replays = Replays(words, out)
    tables = [(Path(name).stem, key) for name, key in asked if key]
    num_timed = given.time or (_QUICK_TIMES if given.quick else 0)
    try:
        if studies[0].num_frames:
            replays.record(rows, frames)
            # Where whole studies are asked for: it belongs to none of their tables.
            if len(tables) < len(asked) and any(one.says_how_sure for one in studies):
                record_choices(words.load(), frames, out)
        if num_timed:
            replays.time(rows, frames.for_times(num_timed))
        if not given.no_episodes:
            episodes.play(rows, _QUICK_EPISODES if given.quick else None)
    finally:
        _write_facts(out / FACTS, replays, _facts(frames))
        if any(table.shows_steps for study in studies for table in study.table):
            _write_strip(frames, out / STRIP)
        write(out)
    results = ResultsFolder(out)
    for name, key in tables:
        sys.stdout.write(f"{results.table_text(name, key)}\n\n")
    sys.stdout.write(
        f"wrote {out / PAGE}\nnext: python -m scripts.reproduce --check {quote(str(out))}\n"
    )
    return 0


def split_study(text: str) -> tuple[str, str]:
    """The study, a name or the path of a file, and the table; empty for all of its tables."""
    if SUFFIX in text:
        path, _, key = text.rpartition(SUFFIX)
        return f"{path}{SUFFIX}", key.removeprefix("/")
    name, _, key = text.partition("/")
    return name, key


def _refuse_unused(given: argparse.Namespace) -> None:
    """Raise `ReproductionError` for flags of the policy that no row would heed."""
    if getattr(given, "decoding", DEFAULT_METHOD) != DEFAULT_METHOD:
        raise ReproductionError(
            f"--decoding {given.decoding}: every row says its own method; write a study with a row "
            "for yours (docs/reproducing.md) and give its path"
        )
    if getattr(given, "radius", None) is not None:
        raise ReproductionError(f"--radius {given.radius}: write METHOD:radius=N in a row instead")


def _rows(given: argparse.Namespace, studies: Sequence[Study], keys: Sequence[str]) -> list[Row]:
    """Those asked for; `ReproductionError` where there are none."""
    asked = zip(studies, [*keys, *[""] * len(studies)], strict=False)
    found = distinct(row for study, key in asked for row in study.rows(key, given.row))
    if len(found) < 2:
        raise ReproductionError(
            f"{' '.join(given.studies)}: no such table, or no row {' or '.join(given.row)}; the "
            f"studies are files in {FOLDER}"
        )
    return found


def _load(names: Sequence[str], out: Path) -> list[Study]:
    """The studies asked for, by name or path; their files go with the results."""
    known = study_names()
    if ALL in names:  # those that answer frames
        names = [name for name in known if load_study(FOLDER / f"{name}{SUFFIX}").num_frames]
    unknown = {name for name in names if not name.endswith(SUFFIX)} - set(known)
    if unknown:
        raise ReproductionError(
            f"unknown study {min(unknown)!r}; known: {', '.join(known)}, {ALL}, or the path of a "
            f"file that ends in {SUFFIX}"
        )
    paths = [Path(name) if name.endswith(SUFFIX) else FOLDER / f"{name}{SUFFIX}" for name in names]
    studies = [load_study(path) for path in paths]
    (out / STUDIES).mkdir(parents=True, exist_ok=True)
    for path in paths:
        kept = out / STUDIES / path.name
        if path.resolve() != kept.resolve():
            shutil.copyfile(path, kept)
    return studies


def _evaluation_flags(given: argparse.Namespace) -> tuple[str, ...]:
    flags = ["--tasks", given.tasks, "--trials", given.trials, "--workers", given.workers]
    for name in ("assets", "ray"):
        if value := getattr(given, name):
            flags += [f"--{name}", value]
    return tuple(flags)


def _frames(given: argparse.Namespace, study: Study, episodes: Played) -> FrameSet:
    """Those given, or those that plain decoding sees when it plays."""
    usual = _QUICK_FRAMES if given.quick else study.num_frames
    limit: int = given.frames or usual or given.time
    if given.recording is not None:
        return FrameSet(given.recording, limit, read_cameras(given))
    if not study.num_frames:
        raise ReproductionError(f"{study.title}: times alone, so give the frames: --recording DATA")
    return FrameSet(episodes.record_frames(math.ceil(limit / _STEPS_PER_EPISODE)), limit)


def _write_facts(path: Path, replays: Replays, found: dict[str, str]) -> None:
    """What an earlier sitting said and left out holds for its lines."""
    known = ResultsFolder(path.parent).facts if path.exists() else {}
    environment = {**known.get("environment", {}), **replays.told, **found}
    left_out = {**known.get("left_out", {}), **replays.left_out}
    told = {"environment": environment, "left_out": left_out}
    write_atomically(path, json.dumps(told, indent=2).encode() + b"\n")


def _facts(frames: FrameSet) -> dict[str, str]:
    """What numbers depend on beside the policy."""
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    return {
        "frames": frames.label,
        "plans": "fixed (--no-guard); the guard's where times were taken",
        "seeds": "0 of scripted drafts and random weights, 7 of episodes",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}",
        "peak memory": f"{peak_gb:.1f} GB of this process",
        "commit": _commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def _commit() -> str:
    """Of the checkout that this file lies in; where it lies in none, the version."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return told.stdout.strip() or distribution_version("deft-vla")


def _write_strip(frames: FrameSet, path: Path) -> None:
    """Evenly spaced frames of the first episode, side by side."""
    _, seen = next(frames.episodes())
    picked = np.linspace(0, len(seen) - 1, _STRIP_FRAMES).astype(int)
    small = [Image.fromarray(seen[index].image).resize((128, 128)) for index in picked]
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.hstack([np.asarray(one) for one in small])).save(path, optimize=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
