"""Tables of the page of performance are those of the lines beside it."""

import pytest

from scripts.bench.gpu.page import PAGE, made_anew


def test_tables_of_a_gpu_are_made_from_their_lines() -> None:
    text = PAGE.read_text()
    assert text.count("<!-- gpu ") == text.count("<!-- end of gpu -->") > 0
    assert made_anew(text) == text, "python -m scripts.bench.gpu.page"


def test_a_question_that_was_not_answered_is_named() -> None:
    text = "<!-- gpu gpu-h200/gpu_run colours -->\n<!-- end of gpu -->\n"
    with pytest.raises(ValueError, match="no answer to 'colours'"):
        made_anew(text)
