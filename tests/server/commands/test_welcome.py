"""What somebody at a terminal reads when `deft serve` is ready."""

from pathlib import Path

from deft_server.commands.serve import welcome
from deft_server.settings import Settings
from tests.server.dashboard.talkative import TalkativePolicy

URL = "http://127.0.0.1:8000"


def test_it_says_what_is_served_where_and_how_to_ask() -> None:
    shown = welcome(TalkativePolicy().info, Settings(), URL)
    rows = dict(line.split(maxsplit=1) for line in shown.splitlines() if line.startswith("  "))
    assert rows["method"].startswith(TalkativePolicy().info.decoding)
    assert rows["address"] == URL
    assert rows["dashboard"] == f"{URL}/dashboard"
    assert rows["try"].endswith(f"{URL}/v1/act")
    assert "Bearer" not in rows["try"]


def test_it_tells_nothing_of_what_is_switched_off_and_asks_for_the_key() -> None:
    shown = welcome(
        TalkativePolicy().info, Settings(dashboard=False, keys_file=Path("keys.toml")), URL
    )
    assert "/dashboard" not in shown
    assert "Authorization: Bearer KEY" in shown
