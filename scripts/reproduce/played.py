"""Rows that are played in closed loop, by `deft-client eval` against a server of this machine.

Plain decoding is played first, and the frames it saw are recorded: what every row replays.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from deft_core.recordings import SUFFIX
from scripts.local_server import local_server
from scripts.reproduce.record import PolicyWords
from scripts.reproduce.study import PLAIN, ReproductionError, Row

FOLDER = "played"
RECORDING = "recording"


@dataclass(frozen=True)
class Played:
    """Which episodes are played, as `deft-client eval` takes them, and where from."""

    words: PolicyWords
    out: Path
    suite: str
    flags: tuple[str, ...]  # of `deft-client eval`: tasks, trials, assets, ...
    host: str | None = None  # that workers on other machines reach the server at

    def record_frames(self, num_episodes: int) -> Path:
        """Let plain decoding play, and keep what it saw; done once per folder.

        The episodes count among those played.
        """
        folder, played = self.out / RECORDING, self.out / FOLDER
        if not folder.exists():
            unfinished, begun = self.out / f".{RECORDING}", self.out / f".{FOLDER}"
            shutil.rmtree(unfinished, ignore_errors=True)  # a run cut short has half an episode
            shutil.rmtree(begun, ignore_errors=True)
            with self._server("--record", str(unfinished)) as url:
                self._play(url, [PLAIN], begun, num_episodes)
            if not any(unfinished.rglob(f"*{SUFFIX}")):
                raise ReproductionError(f"{unfinished}: the server recorded nothing")
            (unfinished / ".gitignore").write_text("*\n")  # pictures have no place among results
            if played.exists():
                shutil.rmtree(begun)
            else:
                begun.rename(played)
            unfinished.rename(folder)
        return folder

    def play(self, rows: Sequence[Row], num_episodes: int | None) -> None:
        """Play what is missing."""
        methods = list(dict.fromkeys(row.method for row in rows if row.played))
        if methods:
            with self._server() as url:
                self._play(url, methods, self.out / FOLDER, num_episodes)

    def _server(self, *flags: str) -> AbstractContextManager[str]:
        policy = ("--policy", self.words.name, *self.words.flags, "--no-guard")
        elsewhere = ("--host", self.host, "--allow-anyone") if self.host else ()
        return local_server(*policy, *elsewhere, *flags)

    def _play(self, url: str, methods: Sequence[str], out: Path, num: int | None) -> None:
        episodes = () if num is None else ("--episodes", str(num))
        command = [
            *(sys.executable, "-m", "deft_client", "eval", self.suite, "--url", url, "--stream"),
            "--fast",  # as the rows of the pages were played
            *("--out", str(out), "--decoding", *methods, *self.flags, *episodes),
        ]
        code = subprocess.run(command, check=False).returncode
        if code:
            raise ReproductionError(
                f"the evaluation ended with {code}; the same command goes on. Without a simulator: "
                "--recording DATA for the frames, and --no-episodes"
            )
