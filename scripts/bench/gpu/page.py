"""Tables that a GPU gave, on pages and in the README, made from the lines of its runs.

`python -m scripts.bench.gpu.page` writes them anew. A block of a page names the file of lines
below docs/results and the question: `<!-- gpu gpu-h200/gpu_run frames -->`. It may also name the
columns, `<!-- gpu gpu-h200/gpu_run frames: method, p50 ms -->`; rows without one of them are left
out.
"""

import json
import re
import sys

from scripts.bench.gpu.asking import ROOT, Answer, State

_DOCS = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    _DOCS / "performance.md",
    _DOCS / "results.md",
    _DOCS / "results" / "gpu.md",
)
_RESULTS = ROOT / "docs" / "results"
_BLOCK = re.compile(r"<!-- gpu (\S+) (\S+?)(?:: (.+?))? -->\n.*?<!-- end of gpu -->\n", re.S)


def made_anew(text: str) -> str:
    """A page with every such table made from its lines."""
    return _BLOCK.sub(lambda found: _block(found[1], found[2], found[3]), text)


def _block(file: str, question: str, columns: str | None) -> str:
    for line in (_RESULTS / f"{file}.jsonl").read_text().splitlines():
        known = json.loads(line)
        if known["name"] == question:
            rows, asked = known["rows"], question
            if columns is not None:
                names, asked = columns.split(", "), f"{question}: {columns}"
                full = [row for row in rows if all(row.get(name) is not None for name in names)]
                rows = [{name: row[name] for name in names} for row in full]
            answer = Answer(question, State.ANSWERED, known["seconds"], rows)
            _, table = answer.table(aligned=False).split("\n", 1)
            about = f"{known['card']}, torch {known['torch']}, commit {known['commit'][:8]}"
            return f"<!-- gpu {file} {asked} -->\n{table}\n{about}\n<!-- end of gpu -->\n"
    raise ValueError(f"docs/results/{file}.jsonl has no answer to {question!r}")


def main() -> int:
    """Write the pages."""
    for page in PAGES:
        page.write_text(made_anew(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
