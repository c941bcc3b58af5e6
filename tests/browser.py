"""A headless Chromium for the tests of pages, and what every page must hold there."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium (apt install chromium)"
)
WIDTHS = (1280, 390)
PATIENCE_MS = 60_000  # of a machine that does much else
sync_api.expect.set_options(timeout=PATIENCE_MS)
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")


@contextmanager
def launched() -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: "sync_api.Browser", url: str, width: int = 1280, scheme: str = "light"
) -> Iterator["sync_api.Page"]:
    """Open a page; fail if anything was written to its console by the time it is closed."""
    said: list[str] = []
    size = {"width": width, "height": 860}
    context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(url)
    yield page
    context.close()
    assert said == []


def assert_fits(page: "sync_api.Page", width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def assert_everybody_can_use(page: "sync_api.Page") -> None:
    """axe-core's rules: contrast of 4.5, names, order of headings, what the keyboard reaches."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []
