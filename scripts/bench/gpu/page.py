"""The tables of docs/performance.md that a GPU gave, made from the lines of its runs.

`python -m scripts.bench.gpu.page` writes them anew. A block of the page names the file of lines
below docs/results and the question: `<!-- gpu gpu-h200/gpu_run frames -->`.
"""

import json
import re
import sys

from scripts.bench.gpu.asking import ROOT, Answer, State

PAGE = ROOT / "docs" / "performance.md"
_RESULTS = ROOT / "docs" / "results"
_BLOCK = re.compile(r"<!-- gpu (\S+) (\S+) -->\n.*?<!-- end of gpu -->\n", re.S)


def made_anew(text: str) -> str:
    """The page with every such table made from its lines."""
    return _BLOCK.sub(lambda found: _block(found[1], found[2]), text)


def _block(file: str, question: str) -> str:
    for line in (_RESULTS / f"{file}.jsonl").read_text().splitlines():
        known = json.loads(line)
        if known["name"] == question:
            answer = Answer(question, State.ANSWERED, known["seconds"], known["rows"])
            _, table = answer.table(aligned=False).split("\n", 1)
            about = f"{known['card']}, torch {known['torch']}, commit {known['commit'][:8]}"
            return f"<!-- gpu {file} {question} -->\n{table}\n{about}\n<!-- end of gpu -->\n"
    raise ValueError(f"docs/results/{file}.jsonl has no answer to {question!r}")


def main() -> int:
    """Write the page."""
    PAGE.write_text(made_anew(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
