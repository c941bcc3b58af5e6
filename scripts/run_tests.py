"""`make test`, and with --all `make test-all`; where the machine cannot render, says what to do.

With --once-more, up to five tests that failed are run again, alone: where they pass, so did all.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from deft_client.libero.errors import GraphicsError
from deft_client.libero.simulator.graphics import Renderer, find_renderer

DEFAULT_MARKS = "not gpu and not checkpoint"
ONCE_MORE = "--once-more"
FEW = 5  # failures that a busy machine may explain
TESTS_FAILED = 1  # pytest's exit code where nothing else went wrong


def main(flags: list[str]) -> int:
    """Run pytest with the flags after --all; return its exit code."""
    marks, notice = DEFAULT_MARKS, ""
    if flags[:1] == ["--all"]:
        flags = flags[1:]
    else:
        marks += " and not long"
    try:
        find_renderer(Renderer.AUTO)
    except GraphicsError as error:
        marks += " and not libero"
        notice = f"\nThe tests that run the simulator are left out: {error}\n"
    if find_spec("ray") is None:
        notice += "\nThe tests on Ray are skipped: make install-ray\n"
    print(notice, end="", flush=True)
    # One thread per worker: torch would otherwise start one per core in each of them. Tests of two
    # threads let the other workers run while one waits for the other.
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **os.environ}
    pytest = [sys.executable, "-m", "pytest", "-m", marks, "--dist", "worksteal"]
    pytest += [flag for flag in flags if flag != ONCE_MORE]

    def run(*more: str) -> int:
        return subprocess.run([*pytest, *more], env=environment, check=False).returncode

    code = run_once_more(run) if ONCE_MORE in flags else run()
    print(notice, end="")
    return code


def run_once_more(run: Callable[..., int]) -> int:
    """Run the tests, and those that failed alone if they are few; return the last exit code."""
    with tempfile.TemporaryDirectory() as folder:
        cache = ("-o", f"cache_dir={folder}")
        code = run(*cache)
        if code != TESTS_FAILED:
            return code
        failed = list(json.loads((Path(folder) / "v/cache/lastfailed").read_text()))
        if len(failed) > FEW:
            return code
        code = run(*cache, "--last-failed", "--numprocesses", "0")
    if code == 0:
        print("failed beside others, passed alone:", *failed, flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
