"""What somebody at a terminal reads when `deft serve` is ready."""

import os
import pty
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from deft_server.commands.serve import welcome
from deft_server.settings import Settings
from tests.server.dashboard.talkative import TalkativePolicy
from tests.typed import next_command

URL = "http://127.0.0.1:8000"


def test_the_welcome_says_what_is_served_where_and_how_to_ask() -> None:
    taught = ("open the robot's box", "close it")
    shown = welcome(replace(TalkativePolicy().info, instructions=taught), Settings(), URL)
    rows = dict(line.split(maxsplit=1) for line in shown.splitlines() if line.startswith("  "))
    assert rows["method"].startswith(TalkativePolicy().info.decoding)
    assert rows["address"] == URL
    assert rows["dashboard"] == f"{URL}/dashboard"
    assert rows["try"].endswith(f"{URL}/v1/act")
    assert "Bearer" not in rows["try"]
    sent = dict(one.split("=", 1) for one in shlex.split(rows["try"]) if "=" in one)
    assert Path(sent["image"].removeprefix("@")).is_file()
    assert sent["instruction"] == taught[0]


def test_the_welcome_leaves_out_what_is_switched_off_and_asks_for_the_key() -> None:
    shown = welcome(
        TalkativePolicy().info, Settings(dashboard=False, keys_file=Path("keys.toml")), URL
    )
    assert f"{URL}/dashboard" not in shown
    assert "Authorization: Bearer KEY" in shown


def test_a_terminal_is_greeted_and_told_how_to_replay(
    tmp_path: Path,
) -> None:
    ours, theirs = pty.openpty()
    where = ["--policy", "constant", "--port", "0", "--record", str(tmp_path)]
    command = [sys.executable, "-m", "deft_server", "serve", *where]
    with subprocess.Popen(command, stderr=theirs) as server, open(ours, "rb", buffering=0) as read:
        os.close(theirs)
        shown = b""
        while b"  try " not in shown:
            shown += read.read(1024)
        server.send_signal(signal.SIGINT)
        while b"next: " not in shown or not shown.endswith(b"\n"):
            shown += read.read(1024)
    assert server.returncode == 0
    said = next_command(shown.decode())
    assert said == ["deft", "replay", str(tmp_path), "--policy", "constant"]
