"""The report in a real browser, on a telephone and on a desk, in light and dark."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deft_libero.commands.report import main
from deft_libero.evaluation.video import write_video
from deft_libero.results.records import Outcome
from deft_libero.results.store import ResultsStore
from tests.browser import (
    WIDTHS,
    assert_everybody_can_use,
    assert_fits,
    launched,
    needs_chromium,
    opened,
    sync_api,
)
from tests.libero.episodes import header, record

expect = sync_api.expect
pytestmark = needs_chromium
OUTCOMES = (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.ERRORED)


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of three episodes that ended differently, two of them filmed; and an empty run."""
    folder = tmp_path_factory.mktemp("results")
    for name in ("autoregressive", "lossless", "deft"):
        _write_run(folder / "runs" / name, name)
    ResultsStore(folder / "empty", header()).close()
    return folder


def _write_run(folder: Path, name: str) -> None:
    head = replace(header(name, decoding=name), name=f"libero_object {name} stream")
    store = ResultsStore(folder, head)
    for trial, outcome in enumerate(OUTCOMES):
        passes = (0,) * 7 if name == "autoregressive" else (3, 2)
        one = record(0, trial, outcome, num_steps=4, passes=passes)
        one = replace(one, video=f"videos/{trial}.mp4" if trial < 2 else "")
        store.append(one)
        if one.video:
            pictures = [np.full((64, 64, 3), 50 * step, np.uint8) for step in range(5)]
            write_video(folder / one.video, one, pictures, 280)
    store.close()


@pytest.mark.parametrize("what", ["runs", "runs/lossless", "empty"])
def test_reports_can_be_read_and_used_by_everybody(
    browser: "sync_api.Browser", folder: Path, what: str
) -> None:
    out = folder / f"{Path(what).name}.html"
    assert main([str(folder / what), "--out", str(out)]) == 0
    for width in WIDTHS:
        for scheme in ("light", "dark"):
            with opened(browser, out.as_uri(), width, scheme) as page:
                page.evaluate(
                    "document.querySelectorAll('details').forEach((one) => one.open = true)"
                )
                assert_everybody_can_use(page)
                assert_fits(page, width)


def test_the_videos_of_the_chosen_trial_play_together(
    browser: "sync_api.Browser", folder: Path
) -> None:
    out = folder / "together.html"
    assert main([str(folder / "runs"), "--out", str(out)]) == 0
    with opened(browser, out.as_uri()) as page:
        assert page.locator("video:visible").count() == 3
        page.select_option("#race", index=1)
        button = page.locator("#play")
        expect(button).to_have_text("Play at true speed")
        button.click()
        assert page.evaluate(
            "[...document.querySelectorAll('.race:not([hidden]) video')]"
            ".every((video) => Math.abs(video.playbackRate - video.dataset.rate) < 1e-6)"
        )
        expect(button).to_have_text("Pause")
        expect(button).to_have_text("Play at true speed")  # at the end
        for clock in page.locator(".race:not([hidden]) .clock").all():
            expect(clock).to_contain_text("failed after")
