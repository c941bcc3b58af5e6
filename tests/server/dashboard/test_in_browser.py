"""The pages in a real browser: they draw, react to clicks and keys, and complain about nothing."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import httpx2
import numpy as np
import pytest
from PIL import Image

from deft_core.types import ActOptions, Observation
from deft_core.wire import codec
from deft_core.wire.formats import WireFormat
from deft_core.wire.messages import ActMessage
from deft_server.app import DeftApp, create_app
from deft_server.settings import Settings
from tests.browser import (
    WIDTHS,
    assert_everybody_can_use,
    assert_fits,
    launched,
    needs_chromium,
    opened,
    sync_api,
)
from tests.server.dashboard.talkative import TalkativePolicy
from tests.server.running import running

expect = sync_api.expect
pytestmark = needs_chromium

ADMIN_KEY = "a-key-of-the-administrator"


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with launched() as browser:
        yield browser


def build_app(settings: Settings | None = None) -> DeftApp:
    return create_app(TalkativePolicy(), settings or Settings())


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running(build_app()) as address:
        yield address


@contextmanager
def robots(address: str) -> Iterator[None]:
    """Two robots that send frames."""
    stop = threading.Event()

    def drive(session_id: str) -> None:
        frame = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
        message = ActMessage(
            Observation(frame, f"instruction of {session_id}", {"wrist": frame[::-1].copy()}),
            ActOptions(session_id=session_id, decoding="relaxed"),
        )
        body, headers = (
            codec.encode_request(message),
            {"content-type": WireFormat.MSGPACK.value},
        )
        with httpx2.Client() as client:
            while not stop.wait(0.05):
                client.post(f"http://{address}/v1/act", content=body, headers=headers)

    threads = [threading.Thread(target=drive, args=(name,)) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def colours_in(screenshot: bytes) -> int:
    with Image.open(BytesIO(screenshot)) as image:
        return len(image.convert("RGB").getcolors(10**7) or ())


@pytest.mark.parametrize("width", WIDTHS)
def test_the_live_view_shows_the_chosen_session(
    browser: "sync_api.Browser", address: str, width: int
) -> None:
    with opened(browser, f"http://{address}/dashboard", width) as page, robots(address):
        page.locator("#sessions button", has_text="right").first.click()
        expect(page.locator("#instruction")).to_have_text("instruction of right")
        page.wait_for_selector("#frame:not([hidden])")
        expect(page.locator("#cameras img")).to_have_attribute(
            "alt", "Last frame of the camera wrist"
        )
        page.wait_for_selector("#tree circle")
        assert page.locator("#actions path").count() == 7
        assert page.locator("#latency rect").count() > 3
        assert page.locator("#accepted rect").count() > 0
        assert page.locator("#tokens li").count() == 7
        assert "of 7 tokens drafted" in page.inner_text("#method")
        chosen = page.locator("#sessions [aria-pressed=true] strong")
        expect(chosen).to_have_text("right")
        page.locator("#sessions button", has_text="left").first.focus()
        page.keyboard.press("Enter")
        expect(chosen).to_have_text("left")
        expect(page.locator("#figure-p50")).to_contain_text("ms")
        assert colours_in(page.screenshot(full_page=True)) > 100
        assert_fits(page, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_that_nobody_feeds_shows_an_example_and_answers_it(
    browser: "sync_api.Browser", width: int
) -> None:
    with running(build_app()) as own, opened(browser, f"http://{own}/dashboard", width) as page:
        expect(page.locator("#nobody")).to_be_visible()
        assert page.locator("#nobody img").evaluate("one => one.naturalWidth") > 0
        assert_fits(page, width)
        assert_everybody_can_use(page)
        page.click("#nobody-act")
        expect(page.locator("#sessions strong")).to_have_text("example")
        expect(page.locator("#nobody")).to_be_hidden()
        page.wait_for_selector("#timeline rect")
        assert "1 answers" in page.inner_text("#past-now")


def test_rules_and_plans_are_said_in_words(browser: "sync_api.Browser", address: str) -> None:
    """`WithinDrift(rule=WithinLimits(move=3.5, ...` stood on the page."""
    said = {
        "WithinDrift(rule=WithinLimits(move=3.5, turn=0.5, cap=15), move=9.0, turn=1.5, cap=30)": (
            "off by at most 3.5 mm and 0.5° a step, and 9.0 mm and 1.5° in all"
        ),
        "ExactMatch()": "same tokens as plain decoding",
        "WithinBins(radius=9)": "at most 9 bins away from the model's own",
        "Mine(x=1)": "Mine(x=1)",
        "no rule": "no rule",
    }
    with opened(browser, f"http://{address}/dashboard", WIDTHS[0]) as page:
        found = page.evaluate(
            "async (texts) => { const words = await import('/dashboard/static/words.js');"
            " return texts.map(words.describeRule); }",
            list(said),
        )
        plan = page.evaluate(
            "async () => (await import('/dashboard/static/words.js'))"
            ".describePlan('memory+recycled')"
        )
    assert found == list(said.values())
    assert plan == "drafts the last action, then what followed such tokens before"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_playground_answers_a_picture_and_compares_runs(
    browser: "sync_api.Browser", address: str, width: int, tmp_path: Path
) -> None:
    picture = tmp_path / "frame.png"
    Image.fromarray(np.full((48, 48, 3), 120, np.uint8)).save(picture)
    with opened(browser, f"http://{address}/dashboard", width) as page:
        page.click("#tab-playground")
        page.wait_for_selector("#try-decoding option", state="attached")
        expect(page.locator("#drop-text")).to_contain_text("An example")
        expect(page.locator("#try-runs tr")).to_have_count(2)  # of the example, by itself
        page.set_input_files("#file", picture)
        for num_runs, decoding in ((4, "lossless"), (5, "autoregressive")):
            page.select_option("#try-decoding", decoding)
            page.fill("#try-radius", "3")
            page.click("#try-send")
            expect(page.locator("#try-runs tr")).to_have_count(num_runs)
        assert page.locator("#try-action tr").count() == 7
        assert page.locator("#try-timing rect").count() > 3
        assert page.locator("#try-tree rect.bonus").count() == 7
        runs = page.inner_text("#try-runs")
        methods = [line.split()[0] for line in runs.splitlines()]
        assert methods[:3] == ["autoregressive", "lossless", "autoregressive"]  # newest first
        assert_fits(page, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_api_page_lists_operations_and_their_schemas(
    browser: "sync_api.Browser", address: str, width: int
) -> None:
    with opened(browser, f"http://{address}/docs", width) as page:
        page.click("#operations summary:has-text('POST /v1/act')")
        page.click("#operations details[open] a:has-text('ActRequest')")
        expect(
            page.locator("#schema-ActRequest[open] code", has_text="instruction")
        ).to_be_visible()
        assert page.locator("#state").is_hidden()
        assert_fits(page, width)


def test_everything_that_can_be_operated_has_a_name(
    browser: "sync_api.Browser", address: str
) -> None:
    nameless = """() => [...document.querySelectorAll(
            'button, input, select, a, canvas, svg[role]')]
        .filter((one) => !one.closest('[hidden]') || one.matches('input, select'))
        .filter((one) => !(one.labels?.length || one.textContent.trim()
            || one.getAttribute('aria-label') || one.title))
        .map((one) => one.outerHTML.slice(0, 100))"""
    for path in ("/dashboard", "/dashboard#playground"):
        with opened(browser, f"http://{address}{path}") as page, robots(address):
            expect(page.locator("#link")).to_have_text("live")
            assert page.evaluate(nameless) == [], path
            images = "[...document.images].filter((one) => !one.hasAttribute('alt')).length"
            assert page.evaluate(images) == 0


@pytest.mark.parametrize("path", ["", "#playground", "/../docs"])
def test_pages_can_be_read_and_used_by_everybody(
    browser: "sync_api.Browser", address: str, path: str
) -> None:
    with opened(browser, f"http://{address}/dashboard{path}") as page, robots(address):
        page.wait_for_selector("#sessions button, #operations details", state="attached")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 860})
            for _ in ("light", "dark"):
                assert_everybody_can_use(page)
                assert_fits(page, width)
                page.click("#theme")


def test_the_theme_can_be_changed_and_is_remembered(
    browser: "sync_api.Browser", address: str
) -> None:
    with opened(browser, f"http://{address}/docs") as page:
        theme = "document.documentElement.dataset.theme"
        assert page.evaluate(theme) == "light"
        page.click("#theme")
        assert page.evaluate(theme) == "dark"
        page.reload()
        assert page.evaluate(theme) == "dark"


def test_with_keys_the_page_asks_for_one_and_then_works(
    browser: "sync_api.Browser", tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[boss]\nkey = "{ADMIN_KEY}"\nadmin = true\n')
    with (
        running(build_app(Settings(keys_file=keys))) as address,
        opened(browser, f"http://{address}/dashboard") as page,
    ):
        page.fill("#key", ADMIN_KEY)
        page.click("#key-form button")
        expect(page.locator("#link")).to_have_text("live")
        assert page.locator("#key-form").is_hidden()


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_a_lost_server_is_shown_as_lost_since_when(
    browser: "sync_api.Browser", address: str, how: str
) -> None:
    feeds: list[sync_api.WebSocketRoute] = []

    def feed(socket: "sync_api.WebSocketRoute") -> None:
        feeds.append(socket)
        if len(feeds) == 1:  # later ones hear nothing
            overview = {"phase": "ready", "phase_text": "", "waiting": 0, "errors": 0}
            socket.on_message(lambda _: socket.send(json.dumps({"overview": overview})))

    with opened(browser, f"http://{address}/docs") as page:
        page.clock.install()
        page.route_web_socket("**/dashboard/feed", feed)
        page.goto(f"http://{address}/dashboard")
        state = page.locator("#link")
        expect(state).to_have_attribute("data-state", "good")
        if how == "closed":
            feeds[0].close()
        else:
            page.clock.run_for(10_000)
        expect(state).to_have_text(re.compile(r"lost since \d?\d:\d\d:\d\d"))
        expect(state).to_have_attribute("data-state", "")
        expect(page.locator("#link, #phase").filter(visible=True)).to_have_count(1)
        assert page.locator(".stale .figures").count() == page.locator(".figures").count()
        page.clock.run_for(10_000)
        assert len(feeds) > 1
        expect(state).to_have_attribute("data-state", "")


def test_the_picture_of_an_ended_session_is_not_shown_for_another(
    browser: "sync_api.Browser", address: str
) -> None:
    feeds: list[sync_api.WebSocketRoute] = []
    with opened(browser, f"http://{address}/docs") as page:
        page.route_web_socket("**/dashboard/feed", lambda socket: feeds.append(socket))
        page.goto(f"http://{address}/dashboard")
        expect(page.locator("#link")).to_have_text("connecting")
        pixel = "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>"
        for key, frames in (("one", {"": pixel, "wrist": pixel}), ("two", {})):
            watched = {"key": key, "instruction": key, "frames": frames}
            feeds[-1].send(json.dumps({"watched": watched}))
            expect(page.locator("#instruction")).to_have_text(key)
            assert page.locator("#frame[hidden]").count() == (key == "two")
            assert page.locator("#cameras img").count() == (key == "one")


def test_the_bars_of_accepted_length_mean_what_the_caption_says(
    browser: "sync_api.Browser", address: str
) -> None:
    draw = """(points) => import('/dashboard/static/plots.js').then((plots) => {
        const box = document.createElement('div');
        const mean = plots.drawAccepted(box, document.createElement('div'), points);
        return [mean, ...[...box.querySelectorAll('rect')].map((bar) => bar.height.baseVal.value)];
    })"""
    points = [{"accepted": accepted, "passes": 5} for accepted in ([2, 4], [3], [3, 3, 3], [])]
    with opened(browser, f"http://{address}/dashboard") as page:
        mean, *heights = page.evaluate(draw, points)
    assert mean == 3  # over the six passes that checked drafts
    assert heights[:3] == [heights[0]] * 3
    assert heights[3] == 0
