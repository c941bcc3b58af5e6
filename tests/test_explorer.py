"""The page of docs/explorer in a real browser: why guessing first gives the same answers."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from tests.browser import (
    WIDTHS,
    assert_everybody_can_use,
    assert_fits,
    launched,
    needs_chromium,
    opened,
    sync_api,
)

pytestmark = needs_chromium
EXPLORER = Path(__file__).parents[1] / "docs" / "explorer"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    handler = partial(_Quiet, directory=str(EXPLORER))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with launched() as browser:
        yield browser


@pytest.mark.parametrize("width", WIDTHS)
def test_samples_approach_the_target(browser: "sync_api.Browser", url: str, width: int) -> None:
    with opened(browser, url, width) as page:
        page.click("#draw-5000")
        page.click("#draw-5000")
        assert page.inner_text("#read-drawn") == "10000"
        assert float(page.inner_text("#read-distance")) < 0.08
        kept = float(page.inner_text("#read-kept"))
        assert abs(kept - float(page.inner_text("#read-accept"))) < 0.03
        page.click("#another")
        assert page.inner_text("#read-drawn") == "0"
        page.locator("#heat").focus()
        before = float(page.inner_text("#alpha-now"))
        page.keyboard.press("ArrowLeft")
        assert float(page.inner_text("#alpha-now")) == pytest.approx(before - 0.01, abs=0.006)
        assert_fits(page, width)


def test_the_page_can_be_read_and_used_by_everybody(browser: "sync_api.Browser", url: str) -> None:
    with opened(browser, url) as page:
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 860})
            for _ in ("light", "dark"):
                assert_everybody_can_use(page)
                assert_fits(page, width)
                page.click("#theme")


def test_its_mathematics_is_right(browser: "sync_api.Browser", url: str) -> None:
    """Tokens and passes against a simulation in Python, the corner cases against reason."""
    rng = np.random.default_rng(0)
    with opened(browser, url) as page:

        def maths(expression: str) -> float:
            return float(page.evaluate(f"import('/maths.js').then((maths) => maths.{expression})"))

        for alpha, length in ((0.0, 5), (0.3, 2), (0.7, 5), (1.0, 4)):
            draws = rng.random((100_000, length)) < alpha
            tokens = (np.cumprod(draws, axis=1).sum(axis=1) + 1).mean()
            assert maths(f"tokensPerPass({alpha}, {length})") == pytest.approx(tokens, abs=0.02)
        assert maths("speedup(0, 5, 0.1)") == pytest.approx(1 / 1.5)
        assert maths("bestLength(0, 0.1, 16)") == 0
        assert maths("bestLength(1, 0, 16)") == 16
        assert maths("passesPerAction(0.5, 0, 7)") == 7
        assert maths("passesPerAction(1, 7, 7)") == 1
        assert maths("passesPerAction(0.6, 4, 7)") == pytest.approx(
            np.mean([_simulated_passes(rng, 0.6, 4, 7) for _ in range(4_000)]), abs=0.06
        )


def _simulated_passes(rng: np.random.Generator, alpha: float, length: int, tokens: int) -> int:
    passes = done = 0
    while done < tokens:
        passes += 1
        for _ in range(min(length, tokens - done)):
            if rng.random() >= alpha:
                break
            done += 1
        done += 1
    return passes
