"""How commands and pages write a table: as Markdown, which a terminal shows as well."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

NOTHING = "–"
Item = TypeVar("Item")


@dataclass(frozen=True)
class Column(Generic[Item]):
    """What a column shows of an item, and what that means."""

    heading: str
    text: Callable[[Item], str]  # NOTHING where there is nothing to show
    meaning: str = ""


def column_table(
    columns: Sequence[Column[Item]], items: Iterable[Item], aligned: bool = False
) -> str:
    """A row for each item, without columns that show nothing; below it what the others mean."""
    rows = [[column.text(item) for column in columns] for item in items]
    headings, cells = without_empty([one.heading for one in columns], rows)
    meanings = {one.heading: one.meaning for one in columns if one.meaning}
    table, meant = markdown_table(headings, cells, aligned), legend(headings, meanings)
    return "\n".join(part for part in (table, meant) if part)


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], aligned: bool = False
) -> str:
    """A table; `aligned` for terminals: the first column to the left, the others to the right."""
    lines = [[_cell(cell) for cell in line] for line in (columns, *rows)]
    if not aligned:
        return "".join(_line(line) for line in (lines[0], ["---"] * len(columns), *lines[1:]))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "".join(_line(line) for line in (padded[0], rule, *padded[1:]))


def legend(columns: Iterable[str], meanings: Mapping[str, str]) -> str:
    """A line for each of the columns whose meaning is given."""
    return "".join(f"- {name}: {meanings[name]}\n" for name in columns if name in meanings)


def without_empty(
    columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows without the columns in which no row has anything."""
    kept = [at for at in range(len(columns)) if any(row[at] != NOTHING for row in rows)]
    return [columns[at] for at in kept], [[row[at] for at in kept] for row in rows]


def share_text(share: float) -> str:
    """A share in percent. 100.0% is all: what falls short by less than it shows is 99.9%."""
    return f"{share if share == 1 else min(share, 0.999):.1%}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"
