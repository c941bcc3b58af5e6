"""Numbers of a page against their lines: a results folder as a whole, or a page that quotes some.

A page quotes by a block, `<!-- from DIR#STUDY/TABLE -->` to `<!-- end -->` (or `DIR#facts`), whose
content is made from the lines in DIR, a path beside the page. Outside of blocks and of code it
may have no measured number.
"""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from deft_client.files import write_atomically
from deft_server.reproduce.page import ResultsFolder, outputs, render_facts, render_table
from deft_server.reproduce.study import ReproductionError

_BLOCK = re.compile(r"(<!-- from ([^#\s]+)#(\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_START = "<!-- from "
_CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)
_MEASURED = re.compile(r"\d+\.\d+|\d+\s?%|\d+\s?(ms|mm|s|points|times|of \d+)\b")


def check(path: Path) -> list[str]:
    """What is not as the lines say; empty where all is."""
    if not path.exists():
        raise ReproductionError(f"{path}: no such page or results folder")
    if path.is_dir():
        return list(_check_folder(ResultsFolder(path)))
    text = path.read_text("utf-8")
    return [
        *_differences(path.name, text, fill(text, path.parent)),
        *_loose_numbers(path.name, text),
    ]


def write(path: Path) -> None:
    """Bring a results folder's derived files, or a page's blocks, up to date with the lines."""
    if path.is_dir():
        for name, content in outputs(ResultsFolder(path)).items():
            (path / name).parent.mkdir(exist_ok=True)
            write_atomically(path / name, content.encode())
        return
    write_atomically(path, fill(path.read_text("utf-8"), path.parent).encode())


def fill(text: str, folder: Path) -> str:
    """A page with its blocks made anew from the lines."""
    whole = [found[0].count(_START) for found in _BLOCK.finditer(text)]
    if whole != [1] * text.count(_START):
        raise ReproductionError(
            "a block that begins with `<!-- from DIR#STUDY/TABLE -->` on a line of its own, and no "
            "other block in it, must end with `<!-- end -->`"
        )

    known = {found[2]: ResultsFolder(folder / found[2]) for found in _BLOCK.finditer(text)}

    def made(found: re.Match[str]) -> str:
        return f"{found[1]}{_block(known[found[2]], found[3])}\n{found[5]}"

    return _BLOCK.sub(made, text)


def _block(results: ResultsFolder, key: str) -> str:
    if key == "facts":
        return render_facts(results)
    study, _, table = key.partition("/")
    return render_table(results, study, results.table(study, table))


def _check_folder(results: ResultsFolder) -> Iterator[str]:
    for name, content in outputs(results).items():
        path = results.folder / name
        if not path.is_file():
            yield f"{name} is missing; `deft reproduce --write {results.folder}` makes it"
        else:
            yield from _differences(name, path.read_text("utf-8"), content)


def _differences(name: str, there: str, derived: str) -> Iterator[str]:
    """Line by line: - what stands there, + what the lines say."""
    if there != derived:
        lines = difflib.unified_diff(there.splitlines(), derived.splitlines(), name, "lines", n=0)
        yield from (line.rstrip("\n") for line in lines)


def _loose_numbers(name: str, text: str) -> Iterator[str]:
    """Numbers that look measured and are in no block."""
    rest = _CODE.sub(_blank, _BLOCK.sub(_blank, text))
    for number, line in enumerate(rest.splitlines(), 1):
        for found in _MEASURED.finditer(line):
            yield f"{name} line {number}: {found[0]!r} stands in no block"


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])
