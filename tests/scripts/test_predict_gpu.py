"""The table of goals in the documentation is what the arithmetic yields."""

import pytest

from scripts.predict_gpu import main, predictions
from tests.repository import ROOT


def test_the_documented_table_is_what_the_module_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main() == 0
    printed = [_cells(line) for line in capsys.readouterr().out.splitlines()[2:]]
    written = [_cells(line) for line in (ROOT / "docs/performance.md").read_text().splitlines()]
    assert len(printed) == len(list(predictions()))
    for row in printed:
        assert [*row, "unmeasured"] in written


def test_predictions_are_above_their_limits() -> None:
    found = {one.what: one for one in predictions()}
    assert all(one.predicted_ms > one.limit_ms for one in found.values())
    assert found["autoregressive"].limit_ms == pytest.approx(23.8, abs=0.1)
    assert found["prefill p = 1"].limit_ms == pytest.approx(5.3, abs=0.1)
    assert found["autoregressive fp8"].limit_ms < found["autoregressive"].limit_ms


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| \n").split("|")]
