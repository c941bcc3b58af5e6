"""Kill -9 an evaluation, its workers and its server at random: does any episode suffer?

`python -m scripts.kill_test --kills 20 --episodes 30` plays the point world against `deft serve`,
once undisturbed and once under fire, and compares what is on disk (tests/client/libero/kills.py).
"""

import argparse
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.client.libero.kills import Scene, find_faults, torment

TARGETS = ("evaluation", "worker", "server")


def main() -> int:
    """Print what was killed and what came of it; 1 if anything was lost or damaged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=30)
    parser.add_argument("--delay-ms", type=float, default=40.0, help="slows the episodes down")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    random.seed(seed)
    targets = [TARGETS[number % len(TARGETS)] for number in range(options.kills)]
    random.shuffle(targets)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        quiet, rough = (_scene(Path(folder), name, options) for name in ("quiet", "rough"))
        stack.callback(quiet.stop)
        stack.callback(rough.stop)
        torment(quiet, (), (0.0, 0.0))
        quiet.stop()
        started_s = time.monotonic()
        killed = torment(rough, targets, (0.3, 2.5))
        faults = find_faults(rough.result(), quiet.result())
        told = ", ".join(f"{count} x {target}" for target, count in killed.items())
        print(f"seed {seed}: killed {told} in {time.monotonic() - started_s:.0f} s")
        print(f"{len(rough.result().records)} episodes on disk, {len(faults)} faults")
        for fault in faults:
            print(f"  {fault}")
    if sum(killed.values()) < options.kills:
        print(f"only {sum(killed.values())} of {options.kills} kills hit; raise --delay-ms")
        return 1
    return 1 if faults else 0


def _scene(folder: Path, name: str, options: argparse.Namespace) -> Scene:
    (folder / name).mkdir()
    return Scene(_deft_serve, folder / name, options.episodes, options.delay_ms)


def _deft_serve(port: int) -> list[str]:
    serve = [sys.executable, "-m", "deft_server", "serve", "--policy", "constant"]
    return [*serve, "--port", str(port)]


if __name__ == "__main__":
    raise SystemExit(main())
