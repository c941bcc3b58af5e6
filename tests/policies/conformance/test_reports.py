"""The reports that the page about conformance quotes are whole, and it says what they say."""

import re
from pathlib import Path

import pytest

from deft_policies.conformance import report

REPORTS = sorted(Path("docs/results/conformance").glob("*.json"))
PAGE = Path("docs/conformance.md").read_text().partition("## Which own code has been run")[2]


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_the_page_says_what_a_report_found(path: Path) -> None:
    found = report.read(path)
    _, plain, lossless = found["rows"]
    assert found["is_equal"] is True
    assert found["partings"] == []
    assert re.fullmatch("[0-9a-f]{40}", found["deft"]["commit"])  # nothing was uncommitted
    (line,) = re.findall(rf"^\| {path.stem} \|.*$", PAGE, re.M)
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    for row in (plain, lossless):
        assert cells[2:] == [
            f"{row['equal_tokens']} of {row['num_frames']}",
            f"{row['actions_apart']:.2g}",
            f"{row['logits_apart']:.2g}",
        ]


def test_every_report_is_on_the_page_and_every_row_has_one() -> None:
    rows = re.findall(r"^\| ([\w-]+) \|.*\| \d+ of \d+ \|", PAGE, re.M)
    assert sorted(rows) == [path.stem for path in REPORTS]
