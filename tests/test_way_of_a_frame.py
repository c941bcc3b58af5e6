"""The way of a frame that docs/architecture.md describes is the way a frame takes."""

import os
import re
import sys
import threading
from types import FrameType

import pytest

from deft_client import PolicyClient
from deft_client.types import Observation
from deft_policies.decoding.knobs import find_method
from deft_policies.openvla.policy import PolicySettings
from deft_server.app import create_app
from tests.client.samples import frame
from tests.policies.openvla.test_policy import golden_policy
from tests.repository import ROOT
from tests.server.running import running

PAGE = (ROOT / "docs/architecture.md").read_text()
ROWS = re.findall(r"^\| \d+ \| `([^`]+)` \| `(\w+)` \|", PAGE, re.M)


@pytest.fixture
def entered():
    """Files and functions of ours in the order of their first calls, on any thread.

    Nothing is noted until `start` is set.
    """
    found: dict[tuple[str, str], None] = {}
    start = threading.Event()
    here = f"{ROOT}{os.sep}"

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and start.is_set() and frame.f_code.co_filename.startswith(here):
            found.setdefault((frame.f_code.co_filename.removeprefix(here), frame.f_code.co_name))

    threading.setprofile(note)
    sys.setprofile(note)
    yield found, start
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]


def test_a_frame_passes_the_files_of_the_page_in_their_order(entered):
    calls, start = entered
    settings = PolicySettings(
        method=find_method("lossless"), statistics_key="libero_spatial", is_guarded=False
    )
    observation = Observation(frame(256, 256), "put the cup down")
    with (
        running(create_app(golden_policy(settings))) as address,
        PolicyClient(f"http://{address}") as client,
    ):
        client.act(observation)  # imports and first compilations are not the frame's way
        start.set()
        client.act(observation)
        start.clear()
    assert [call for call in calls if call in ROWS] == ROWS


def test_the_way_is_short_and_every_file_on_the_page_is_there():
    assert len(ROWS) <= 12
    named = set(re.findall(r"`((?:client|policies|server|draft_training|tests)/[\w/.]+)`", PAGE))
    assert {file for file, _ in ROWS} <= named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
