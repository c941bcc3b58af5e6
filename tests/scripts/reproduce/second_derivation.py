"""Derives the numbers of headline tables from recorded lines, sharing no code with the product.

Lines are gzipped JSON: a header of each run, which has a `folder`, and an episode a line. The
header may come again before episodes that were added later.
"""

import base64
import gzip
import json
import math
import random
import re
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

NOTHING = "–"
_BLOCK = re.compile(r"<!-- from (\S+)#(\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
_Z = 1.959963984540054
_DRAWS = 4000
_PLAIN = "autoregressive"


@dataclass(frozen=True)
class Run:
    """What was recorded of one method."""

    name: str
    folder: str
    method: str
    start: tuple[str, ...]  # what a paired run has in common with it
    episodes: Mapping[tuple[str, int, int], Any] = field(default_factory=dict)

    @property
    def outcomes(self) -> list[bool]:
        judged = ("succeeded", "failed")
        found = [one["outcome"] for one in self.episodes.values()]
        return [one == "succeeded" for one in found if one in judged]

    @property
    def passes(self) -> list[int]:
        """Of each answer; an episode may have none, where the robot held all the time."""
        found = [it["answers"].get("accepted", []) for it in self.episodes.values()]
        return [len(one) for answers in found for one in answers]

    @property
    def committed(self) -> list[int]:
        """Accepted tokens and one more, of every pass that had guesses."""
        found = []
        for one in self.episodes.values():
            answers = one["answers"]
            accepted = answers.get("accepted", [])
            guesses = answers.get("guesses") or [[0] * len(it) for it in accepted]
            for kept, guessed in zip(accepted, guesses, strict=True):
                found += [a + 1 for a, b in zip(kept, guessed, strict=True) if b]
        return found

    def spent_ms(self, key: tuple[str, int, int]) -> list[float]:
        found: list[float] = self.episodes[key]["answers"].get("round_trip_ms", [])
        return found


def read_runs(path: Path) -> list[Run]:
    """Every run of a file, by the order of its headers."""
    runs: dict[str, Run] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            found = json.loads(line)
            if "folder" in found:
                options = found["options"]
                same = {k: v for k, v in options.items() if k not in ("decoding", "radius")}
                start = (found["suite"], found["assets"], json.dumps(same, sort_keys=True))
                run = Run(found["name"], found["folder"], options["decoding"], start)
                runs.setdefault(found["run"], run)
            else:
                key = (found["suite"], found["task"], found["trial"])
                runs[found["run"]].episodes[key] = found  # type: ignore[index]
    return list(runs.values())


def wilson(successes: int, num: int) -> tuple[float, float]:
    """The shares from which the one that was seen lies less than z standard errors away."""
    seen = successes / num

    def is_far(share: float) -> bool:
        return abs(seen - share) > _Z * math.sqrt(share * (1 - share) / num)

    def edge(far: float) -> float:
        near = seen
        for _ in range(60):
            middle = (far + near) / 2
            far, near = (middle, near) if is_far(middle) else (far, middle)
        return near

    return (0.0 if seen == 0 else edge(0.0)), (1.0 if seen == 1 else edge(1.0))


def paired(plain: Run, own: Run) -> tuple[float, float] | None:
    """Bonett and Price's interval of own minus plain, in points; None without a pair."""
    wins = losses = num = 0
    for key, one in own.episodes.items():
        other = plain.episodes.get(key)
        pair = {one["outcome"], other["outcome"] if other else "errored"}
        if "errored" in pair:
            continue
        num += 1
        if len(pair) == 2:
            wins, losses = (
                (wins + 1, losses) if one["outcome"] == "succeeded" else (wins, losses + 1)
            )
    if not num:
        return None
    gain, loss = (wins + 1) / (num + 2), (losses + 1) / (num + 2)
    half = _Z * math.sqrt((gain + loss - (gain - loss) ** 2) / (num + 2))
    return 100 * (gain - loss - half), 100 * (gain - loss + half)


def share_equal(plain: Run, own: Run) -> float:
    """Per cent of the answers whose first action is plain decoding's to the last bit."""
    same = num = 0
    for key, one in own.episodes.items():
        pairs = zip(_rows(one["actions"]), _rows(plain.episodes[key]["actions"]), strict=True)
        for a, b in pairs:
            same, num = same + (a == b), num + 1
    return 100 * same / num


def _rows(actions: Mapping[str, Any]) -> list[bytes]:
    raw = zlib.decompress(base64.b64decode(actions["zlib_f8"]))
    width = 8 * actions["shape"][1]
    return [raw[at : at + width] for at in range(0, len(raw), width)]


def speed_up(plain: Run, own: Run) -> tuple[float, float, float, float]:
    """Ratio of mean milliseconds, its interval over episodes drawn anew, ratio of medians."""
    keys = [key for key in own.episodes if key in plain.episodes]
    sums = [
        (sum(a), len(a), sum(b), len(b))
        for a, b in ((plain.spent_ms(key), own.spent_ms(key)) for key in keys)
    ]

    def ratio(drawn: Sequence[tuple[float, int, float, int]]) -> float:
        a, m, b, n = (sum(column) for column in zip(*drawn, strict=True))
        return a / m / (b / n)

    dice = random.Random(1)
    draws = sorted(ratio(dice.choices(sums, k=len(sums))) for _ in range(_DRAWS))
    every = [[ms for key in keys for ms in run.spent_ms(key)] for run in (plain, own)]
    low, high = draws[round(0.025 * _DRAWS)], draws[round(0.975 * _DRAWS) - 1]
    return ratio(sums), low, high, median(every[0]) / median(every[1])


# A table of a page, and what its cells must be.


@dataclass(frozen=True)
class Cell:
    """A cell of a headline table: what stands there and what the lines say."""

    where: str
    printed: str
    derived: tuple[float, ...]
    tolerance: tuple[float, ...]

    @property
    def is_right(self) -> bool:
        numbers = [float(one) for one in re.findall(r"[+-]?\d+(?:\.\d+)?", self.printed)]
        pairs = zip(numbers, self.derived, self.tolerance, strict=False)
        return len(numbers) >= len(self.derived) and all(abs(a - b) <= c for a, b, c in pairs)


Derive = Callable[[Run, Run], tuple[tuple[float, ...], tuple[float, ...]]]


def _success(_: Run, own: Run) -> tuple[tuple[float, ...], tuple[float, ...]]:
    won, num = sum(own.outcomes), len(own.outcomes)
    return (100 * won / num, won, num), (0.051, 0, 0)


def _wilson(_: Run, own: Run) -> tuple[tuple[float, ...], tuple[float, ...]]:
    low, high = wilson(sum(own.outcomes), len(own.outcomes))
    return (100 * low, 100 * high), (0.051, 0.051)


def _points(plain: Run, own: Run) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return paired(plain, own) or (), (0.051, 0.051)


def _passes(_: Run, own: Run) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return (mean(own.passes),), (0.0051,)


def _committed(_: Run, own: Run) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return (mean(own.committed),), (0.0051,)


def _equal(plain: Run, own: Run) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return (share_equal(plain, own),), (0.051,)


def _times(plain: Run, own: Run) -> tuple[tuple[float, ...], tuple[float, ...]]:
    # Two programs draw episodes differently: the ends of the interval are only near.
    return speed_up(plain, own), (0.0051, 0.06, 0.06, 0.0051)


# By column: which lines it is of ("" where they are the block's own), and how to derive it.
COLUMNS: Mapping[str, tuple[str, Derive]] = {
    "success": ("played", _success),
    "95%": ("played", _wilson),
    "success minus plain's, points (95%)": ("played", _points),
    "minus plain's, points (95%)": ("played", _points),
    "minus the first row's, points (95%)": ("played", _points),
    "passes, played": ("played", _passes),
    "passes": ("frames", _passes),
    "committed length": ("frames", _committed),
    "committed": ("frames", _committed),
    "equal actions": ("frames", _equal),
    "passes, as served": ("timed", _passes),
    "equal actions, as served": ("timed", _equal),
    "times as fast here": ("timed", _times),
}


def headline_cells(page: Path) -> Iterator[Cell]:
    """Every cell of a headline table of a page that this program can derive."""
    for source, key, text in _BLOCK.findall(page.read_text("utf-8")):
        path = page.parent / source
        name, _, first = key.partition("/")
        if name in ("runs", "beside"):
            runs = read_runs(path)
            yield from _cells(page, key, text, partial(_by_name, runs, first))
        elif key.startswith(("comparison/headline", "comparison/readme", "thinking/")):
            yield from _cells(page, key, text, _of_study(path, *key.split("/")))


Find = Callable[[str, str], tuple[Run, Run] | None]


def _cells(page: Path, key: str, text: str, find: Find) -> Iterator[Cell]:
    first = re.search(r"(^\|.*\n)+", text, re.MULTILINE)  # a published one may follow
    assert first is not None
    lines = [line.strip()[1:-1] for line in first[0].splitlines()]
    heading, *rest = [[cell.strip() for cell in line.split("|")] for line in lines]
    for row in rest[1:]:
        for name, printed in zip(heading[1:], row[1:], strict=True):
            if name not in COLUMNS or printed == NOTHING:
                continue
            kind, derive = COLUMNS[name]
            found = find(row[0], kind)
            if found is None or (derive in (_points, _times) and found[0] is found[1]):
                continue
            if "same actions" in printed:
                yield Cell(f"{page.name} {key} {row[0]}", f"{100}", *_equal(*found))
                continue
            yield Cell(f"{page.name} {key} {row[0]}: {name}", printed, *derive(*found))


def _by_name(runs: Sequence[Run], first: str, name: str, _: str) -> tuple[Run, Run] | None:
    own = next(run for run in runs if run.name == name)
    if first:
        return next(run for run in runs if run.folder == first), own
    alike = [run for run in runs if run.method == _PLAIN and run.start == own.start]
    plain = next(iter(alike), own)
    return plain, own


def _of_study(folder: Path, study: str, table: str) -> Find:
    found = tomllib.loads((folder / "studies" / f"{study}.toml").read_text("utf-8"))
    rows = next(one for one in found["table"] if one["key"] == table)["row"]
    methods = {row["name"]: row.get("method", _PLAIN) for row in rows}
    flags = {row["name"]: row.get("flags", []) for row in rows}
    packed = {path.name.split(".")[0]: read_runs(path) for path in folder.glob("*.jsonl.gz")
              if path.name.split(".")[0] in ("frames", "timed", "played")}  # fmt: skip

    def find(row: str, kind: str) -> tuple[Run, Run] | None:
        runs = packed.get(kind, [])
        slug = re.sub(r"[^A-Za-z0-9._+=-]+", "-", " ".join([methods[row], *flags[row]]))
        wanted = {"played": lambda run: run.method}.get(kind, lambda run: run.folder)
        name = methods[row] if kind == "played" else slug
        own = next((run for run in runs if wanted(run) == name), None)
        plain = next((run for run in runs if wanted(run) == _PLAIN), None)
        return None if own is None or plain is None else (plain, own)

    return find
