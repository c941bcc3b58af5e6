"""What a policy writes, in a real browser: its parts, what changed, and what it points at."""

from collections.abc import Iterator

import httpx2
import numpy as np
import pytest

from deft_core.types import ActOptions, Observation
from deft_core.wire import codec
from deft_core.wire.formats import WireFormat
from deft_core.wire.messages import ActMessage
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_server.app import create_app
from tests import golden_pi0fast, golden_qwenfast
from tests.browser import (
    WIDTHS,
    assert_everybody_can_use,
    assert_fits,
    launched,
    needs_chromium,
    opened,
    sync_api,
)
from tests.golden_vla0 import GOLDEN, cameras, variant
from tests.server.running import running
from tests.standins.policies import PATIENCE_S
from tests.standins.thinking import ThinkingPolicy

expect = sync_api.expect
pytestmark = needs_chromium

FIRST = (
    "put the cup on the tray PLAN: move to the cup, grasp it VISIBLE OBJECTS: cup [61, 92, 104, "
    "141], <b>tray</b> [138, 110, 222, 176] MOVE: move left down GRIPPER POSITION: [118, 74, 113, "
    "78, 90, 87] ACTION: x"
)
SECOND = FIRST.replace("left down", "right down").replace("[61, 92, ", "[62, 92, ")
LONG = f"{FIRST.removesuffix('ACTION: x')} PLAN: {'move right, ' * 340} ACTION: x"
ENDLESS = "go PLAN: " + "move right, " * 340


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with launched() as browser:
        yield browser


def send(address: str, times: int = 1) -> None:
    frame = np.full((120, 160, 3), 90, np.uint8)
    for _ in range(times):
        post(address, Observation(frame, "tidy up"))


def post(address: str, observation: Observation) -> None:
    body = codec.encode_request(ActMessage(observation, ActOptions(session_id="arm")))
    headers = {"content-type": WireFormat.MSGPACK.value}
    httpx2.post(f"http://{address}/v1/act", content=body, headers=headers, timeout=PATIENCE_S)


def test_changed_words_are_marked_and_what_is_pointed_at_is_drawn(
    browser: "sync_api.Browser",
) -> None:
    with (
        running(create_app(ThinkingPolicy([FIRST, SECOND]))) as address,
        opened(browser, f"http://{address}/dashboard") as page,
    ):
        expect(page.locator("#link")).to_have_text("live")
        send(address)
        expect(page.locator("#thought-parts dd").nth(3)).to_have_text("move left down")
        assert page.locator("#thought-parts mark").count() == 0
        send(address)
        expect(page.locator("#thought-parts mark")).to_have_text(["[62,", "right"])
        expect(page.locator("#thought-parts dt").first).to_contain_text("tokens · 1 pass")
        expect(page.locator("#thought-cost")).to_contain_text("passes")
        expect(page.locator("#pointed text")).to_have_text(["cup", "<b>tray</b>"])
        assert page.locator("#pointed rect").first.get_attribute("x") == str(62 / 256 * 160)
        assert page.locator("#pointed polyline").count() == 1
        assert page.locator("#trees[hidden]").count() == 1


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_long_texts_can_be_read_by_everybody(
    browser: "sync_api.Browser", width: int, scheme: str
) -> None:
    with (
        running(create_app(ThinkingPolicy([FIRST, LONG]))) as address,
        opened(browser, f"http://{address}/dashboard", width, scheme) as page,
    ):
        expect(page.locator("#link")).to_have_text("live")
        send(address, 2)
        expect(page.locator("#thought-parts dd").nth(5)).to_contain_text("move right")
        assert_everybody_can_use(page)
        assert_fits(page, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_an_answer_of_numbers_is_shown_by_rows_with_its_drafts_marked(
    browser: "sync_api.Browser", width: int
) -> None:
    session = variant("untied")["sessions"][0]
    policy = load_policy(ModelOptions(checkpoint=str(GOLDEN / "untied"), is_guarded=False))
    with (
        running(create_app(policy)) as address,
        opened(browser, f"http://{address}/dashboard", width) as page,
    ):
        expect(page.locator("#link")).to_have_text("live")
        for frame in session["frames"][:2]:
            image, wrist = cameras(frame)
            post(address, Observation(image, session["instruction"], {"wrist": wrist}))
        expect(page.locator("#thought-parts mark")).not_to_have_count(0)
        expect(page.locator("#thought-title")).to_have_text("Answer as it was written")
        rows = page.locator("#thought-parts dd").all_inner_texts()
        assert [len(row.split()) for row in rows] == [7] * 8
        assert_everybody_can_use(page)
        assert_fits(page, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_an_answer_in_fast_codes_is_coefficients_and_curves_with_its_drafts_marked(
    browser: "sync_api.Browser", width: int
) -> None:
    frame = golden_pi0fast.case("quantile", 0)
    policy = load_policy(golden_pi0fast.options_of("quantile", is_guarded=False))
    with (
        running(create_app(policy)) as address,
        opened(browser, f"http://{address}/dashboard", width) as page,
    ):
        expect(page.locator("#link")).to_have_text("live")
        post(address, golden_pi0fast.observation(frame))
        expect(page.locator("#thought-title")).to_have_text("Answer in FAST codes")
        expect(page.locator("#thought-fast .cell")).to_have_count(10 * 7)
        assert page.locator("#thought-fast .drafted").count() == 0
        assert page.locator("#thought-fast path").count() == 7
        assert page.locator("#thought-fast circle").count() == 10 * 7
        assert page.locator("#thought-parts").is_hidden()
        post(address, golden_pi0fast.observation(frame))  # drafted from the answer before
        expect(page.locator("#thought-fast .drafted")).not_to_have_count(0)
        num = page.locator("#thought-fast .drafted").count()
        expect(page.locator("#thought-cost")).to_contain_text(f"{num} of 70 coefficients drafted")
        assert_everybody_can_use(page)
        assert_fits(page, width)


def test_a_text_without_an_action_says_so(browser: "sync_api.Browser") -> None:
    with (
        running(create_app(ThinkingPolicy([ENDLESS]))) as address,
        opened(browser, f"http://{address}/dashboard") as page,
    ):
        expect(page.locator("#link")).to_have_text("live")
        send(address)
        expect(page.locator("#thought-cost")).to_contain_text("7 are needed")
        expect(page.locator("#thought-parts dd").first).to_have_text("go")


def test_the_playground_shows_the_text(browser: "sync_api.Browser") -> None:
    with (
        running(create_app(ThinkingPolicy([FIRST]))) as address,
        opened(browser, f"http://{address}/dashboard#playground") as page,
    ):
        page.wait_for_selector("#preview:not([hidden])")
        page.click("#try-send")
        expect(page.locator("#try-reasoning")).to_have_text(FIRST)
        assert page.locator("#try-trees[hidden]").count() == 1


def test_the_playground_shows_coefficients(browser: "sync_api.Browser") -> None:
    policy = load_policy(golden_qwenfast.options_of("nora"))
    with (
        running(create_app(policy)) as address,
        opened(browser, f"http://{address}/dashboard#playground") as page,
    ):
        expect(page.locator("#try-fast .cell")).to_have_count(1 * 7)
        assert page.locator("#try-reasoning").is_hidden()
