"""Tables of a GPU on the pages are those of the lines of its runs."""

from pathlib import Path

import pytest

from scripts.bench.gpu.page import PAGES, made_anew


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_a_gpu_are_made_from_their_lines(page: Path) -> None:
    text = page.read_text()
    assert text.count("<!-- gpu ") == text.count("<!-- end of gpu -->") > 0
    assert made_anew(text) == text, "python -m scripts.bench.gpu.page"


def test_a_question_that_was_not_answered_is_named() -> None:
    text = "<!-- gpu gpu-h200/gpu_run colours -->\n<!-- end of gpu -->\n"
    with pytest.raises(ValueError, match="no answer to 'colours'"):
        made_anew(text)


def test_a_table_may_have_some_columns_and_then_only_whole_rows() -> None:
    asked = "<!-- gpu gpu-h200/gpu_run transformers: method, p95 ms -->\n"
    _, table = made_anew(f"{asked}<!-- end of gpu -->\n").split(asked)
    assert table.split("\n\n")[0].splitlines() == [
        "| method | p95 ms |",
        "| --- | --- |",
        "| plain | 43.6 |",
        "| transformers, generate | 354.7 |",
    ]
