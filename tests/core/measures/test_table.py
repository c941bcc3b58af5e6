"""What tables show of numbers."""

import pytest

from deft_core.measures.table import share_text


@pytest.mark.parametrize(
    ("share", "shown"), [(1.0, "100.0%"), (2348 / 2349, "99.9%"), (0.986, "98.6%"), (0.0, "0.0%")]
)
def test_only_all_is_shown_as_a_hundred_percent(share: float, shown: str) -> None:
    assert share_text(share) == shown
