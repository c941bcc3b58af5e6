"""What a pass on a GPU takes by arithmetic."""

import pytest

from scripts.predict_gpu import main, predictions


def test_every_goal_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    printed = capsys.readouterr().out
    assert all(one.what in printed for one in predictions())


def test_predictions_are_above_their_limits() -> None:
    found = {one.what: one for one in predictions()}
    assert all(one.predicted_ms > one.limit_ms for one in found.values())
    assert found["autoregressive"].limit_ms == pytest.approx(23.8, abs=0.1)
    assert found["prefill p = 1"].limit_ms == pytest.approx(5.3, abs=0.1)
    assert found["autoregressive fp8"].limit_ms < found["autoregressive"].limit_ms
