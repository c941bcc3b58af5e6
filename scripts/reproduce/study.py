"""A study: which tables it has, which rows they have, and what was published beside them.

A table is rows (a method and its options) by measures, so that another paper, or another row, is a
few lines of TOML. Nothing here runs anything.
"""

import tomllib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from deft_policies.errors import PolicyError
from scripts.reproduce.acceptance import folder_name

FOLDER = Path(__file__).parent / "studies"
SUFFIX = ".toml"
PLAIN = "autoregressive"
STRICT = ConfigDict(extra="forbid")


class ReproductionError(PolicyError):
    """A study, its results or its page are not as they should be; the message says what to do."""


@dataclass(frozen=True)
class Row:
    """One way of answering. `flags` are of the policy, as `deft serve` takes them.

    With `values` it stands for a row each, with the value in the place of {} in name and method.
    With `acceptance`, drafts are scripted: each stands with this chance, in chains of `levels` from
    a draft head; `without_head` the whole answer is drafted for nothing, as the last one is.
    With `like` they are scripted to stand as often as that method's did in the committed lines.
    With `loop` transformers decodes, by that loop of `BaselineLoop`.
    """

    __pydantic_config__ = STRICT
    name: str
    method: str = PLAIN
    flags: tuple[str, ...] = ()
    batch: int = 1
    acceptance: float | None = None
    levels: int = 5
    without_head: bool = False
    like: str = ""
    loop: str = ""
    played: bool | tuple[float, ...] = False  # in closed loop as well; of which values
    x: float | None = None  # its place on the plot's axis
    values: tuple[float, ...] = ()

    @property
    def is_scripted(self) -> bool:
        """Whether its drafts know the answer and err to order."""
        return self.acceptance is not None or bool(self.like)

    @property
    def is_method(self) -> bool:
        """Whether its method answers, as a server would."""
        return not self.is_scripted and not self.loop

    @property
    def slug(self) -> str:
        """The name of its folder: rows that answer alike share one."""
        parts = [self.method, *self.flags]
        parts += [f"batch{self.batch}"] if self.batch > 1 else []
        if self.acceptance is not None:
            parts = [f"scripted-{self.acceptance:g}-levels{self.levels}"]
            parts += ["without head"] if self.without_head else []
        if self.like:
            parts = ["scripted", self.like]
        if self.loop:
            parts = [self.loop]
        return folder_name(*parts)

    def written_out(self) -> Iterator["Row"]:
        """A row for every value; itself where it has none."""
        if not self.values:
            yield self
        for value in self.values:
            name, method = (text.replace("{}", f"{value:g}") for text in (self.name, self.method))
            played = isinstance(self.played, tuple) and value in self.played
            yield replace(self, name=name, method=method, played=played, x=value, values=())


@dataclass(frozen=True)
class Published:
    """What the paper says, as it says it, and why it is not the same thing."""

    __pydantic_config__ = STRICT
    where: str
    differs: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Table:
    """Rows by measures (names of `measures.MEASURES`, some with a number: `accepted:2`).

    A plot shows measures over the rows' `x`, or passes over the steps of one episode ("step").
    """

    __pydantic_config__ = STRICT
    key: str
    title: str
    measures: tuple[str, ...]
    row: tuple[Row, ...] = ()
    baseline: str = PLAIN  # the method, with flags of the base policy, that ratios refer to
    note: str = ""
    plot: tuple[str, ...] = ()
    plot_x: str = ""
    published: Published | None = None

    @property
    def shows_steps(self) -> bool:
        """Whether its plot is over the steps of one episode, whose frames stand below it."""
        return self.plot_x == "step"

    @property
    def rows(self) -> list[Row]:
        """Every row, written out."""
        return [one for row in self.row for one in row.written_out()]


@dataclass(frozen=True)
class Study:
    """The tables of one paper, and how many recorded frames their rows answer.

    None, where only times are taken. `says_how_sure` adds a table of the target's own odds.
    """

    __pydantic_config__ = STRICT
    title: str
    about: str
    table: tuple[Table, ...]
    num_frames: int = 2000
    says_how_sure: bool = False

    def rows(self, key: str = "", names: Collection[str] = ()) -> list[Row]:
        """Rows with their baselines, in order; some answer alike (`distinct`).

        Of one table alone where a `key` is given, and of rows of these names where there are any.
        """
        found: list[Row] = []
        for table in self.table:
            if key in ("", table.key):
                wanted = [row for row in table.rows if not names or row.name in names]
                is_played = any(row.played for row in wanted)
                found += [Row(PLAIN, table.baseline, played=is_played), *wanted]
        return found


def distinct(rows: Iterable[Row]) -> list[Row]:
    """Of rows that answer alike the first; played if any of them is."""
    first: dict[str, Row] = {}
    for row in rows:
        known = first.setdefault(row.slug, row)
        first[row.slug] = replace(known, played=bool(known.played or row.played))
    return list(first.values())


def study_names() -> list[str]:
    """The studies that come with Deft."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def load_study(path: Path) -> Study:
    """Read a study; `ReproductionError` says which field of it is wrong."""
    try:
        return TypeAdapter(Study).validate_python(tomllib.loads(path.read_text("utf-8")))
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise ReproductionError(f"{path} is no study: {error}") from error
