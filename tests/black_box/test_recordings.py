"""What the product does, seen from outside, is what was recorded.

A change on purpose is declared: tests/golden/black_box/README.md says how.
"""

import json

import pytest

from tests.black_box.recordings import (
    FOLDER,
    RECORDINGS,
    differences,
    recorded_text,
    stored,
    stored_names,
)


@pytest.mark.parametrize("name", RECORDINGS)
def test_what_was_recorded_is_what_happens(name: str) -> None:
    made = recorded_text(RECORDINGS[name]())
    found = differences(stored(name), json.loads(made) if name.endswith(".json") else made)
    assert not found, "\n".join([f"{len(found)} differences in {name}:", *found[:40]])


def test_every_recording_on_disk_is_made_by_a_line_of_the_table() -> None:
    assert stored_names() == set(RECORDINGS)


def test_every_declared_change_names_a_recording() -> None:
    rows = [line for line in (FOLDER / "CHANGES.md").read_text().splitlines() if line[:1] == "|"]
    for row in rows[2:]:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 3, row
        assert all(cells), row
