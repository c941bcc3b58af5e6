"""Headline tables say what a second program, which shares no code, derives from the lines."""

from pathlib import Path

import pytest

from scripts.reproduce.page import quoting_pages
from tests.repository import ROOT
from tests.scripts.reproduce.second_derivation import Cell, headline_cells, wilson

PAGES = quoting_pages(ROOT / "docs/results")
WITH_HEADLINE_TABLES = {"README.md", "results.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_cell_of_a_headline_table_is_derived_twice(page: Path) -> None:
    cells = list(headline_cells(page))
    assert cells or page.name not in WITH_HEADLINE_TABLES
    wrong = [f"{one.where}: {one.printed}, not {one.derived}" for one in cells if not one.is_right]
    assert not wrong, "\n".join(wrong)


def test_the_pages_with_headline_tables_are_read() -> None:
    assert {page.name for page in PAGES} >= WITH_HEADLINE_TABLES


def test_one_wrong_digit_is_seen() -> None:
    assert Cell("", "87.0% (87/100)", (87.0, 87, 100), (0.051, 0, 0)).is_right
    assert not Cell("", "87.0% (88/100)", (87.0, 87, 100), (0.051, 0, 0)).is_right
    assert not Cell("", "79.0–92.4", (79.0, 92.2), (0.051, 0.051)).is_right


@pytest.mark.parametrize(("won", "low", "high"), [(87, 0.7902, 0.9224), (0, 0.0, 0.0370)])
def test_wilson_is_that_of_textbooks(won: int, low: float, high: float) -> None:
    assert wilson(won, 100) == pytest.approx((low, high), abs=5e-5)
