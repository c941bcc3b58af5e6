"""The evaluation with LIBERO itself, on whatever assets are there."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from deft_client.libero.commands.evaluate import main
from deft_client.libero.results.store import load_run

pytestmark = [
    pytest.mark.libero,
    pytest.mark.skipif(find_spec("robosuite") is None, reason="needs `make install-libero`"),
]


def test_frames_and_actions_are_the_same_in_every_run_with_one_worker_and_with_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trials of a task: one worker meets them one after the other, two share them."""
    monkeypatch.syspath_prepend(Path(__file__).parents[4])
    runs = []
    for workers in ("1", "2"):
        code = main(
            ["libero_object", "--policy", "tests.client.libero.looking:look", "--tasks", "5",
             "--trials", "40,41", "--step-limit", "4", "--workers", workers,
             "--out", str(tmp_path / workers)]
        )  # fmt: skip
        assert code == 0
        runs.append(load_run(tmp_path / workers / "libero_object-look"))
    one, two = ({record.key: record for record in run.records} for run in runs)
    assert len(one) == 2
    for key, record in one.items():
        assert record.actions.tobytes() == two[key].actions.tobytes(), key
    assert len({record.actions.tobytes() for record in one.values()}) == 2
    assert {record.assets for record in one.values()} == {runs[0].header.assets}
