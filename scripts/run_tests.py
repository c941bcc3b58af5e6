"""`make test`, and with --all `make test-all`; where the machine cannot render, says what to do."""

import os
import subprocess
import sys
from importlib.util import find_spec

from deft_client.libero.errors import GraphicsError
from deft_client.libero.simulator.graphics import Renderer, find_renderer

DEFAULT_MARKS = "not gpu and not checkpoint"


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
    # One thread per worker: torch would otherwise start one per core in each of them.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    pytest = [sys.executable, "-m", "pytest", "-m", marks, "--dist", "worksteal", *flags]
    code = subprocess.run(pytest, env=environment, check=False).returncode
    print(notice, end="")
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
