"""Records where everything rests in LIBERO's own scenes; `deft-client assets check` compares.

python -m scripts.record_settled

Wants the published MuJoCo and LIBERO's own assets. Takes about half an hour of one core; a killed
run begins anew.
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from deft_client.libero import settled
from deft_client.libero.commands.assets import CHECKED_SUITES
from deft_client.libero.simulator.assets import AssetsKind
from deft_client.libero.simulator.assets_check import settle
from deft_client.libero.simulator.environment import EnvironmentSettings, LiberoEnvironment
from deft_client.libero.simulator.graphics import Renderer
from deft_client.libero.simulator.mujoco_version import PUBLISHED, installed_mujoco
from deft_client.libero.simulator.suites import find_suite

OUT = Path(settled.__file__).with_name(settled.FILE)


def main() -> int:
    """Settle every trial of every task, print what is wrong, write the file."""
    if installed_mujoco() != PUBLISHED:
        print(f"MuJoCo {installed_mujoco()} is installed, {PUBLISHED} is wanted", file=sys.stderr)
        return 1
    members: dict[str, NDArray[np.integer]] = {}
    tasks = [task for suite in CHECKED_SUITES for task in find_suite(suite).tasks]
    for task in tqdm(tasks, unit="task"):
        environment = LiberoEnvironment(task, EnvironmentSettings(renderer=Renderer.NONE))
        assert environment.assets.kind is AssetsKind.REAL
        rests = []
        for trial in range(environment.num_trials):
            problems, poses = settle(environment, trial)
            rests.append(poses)
            for problem in problems:
                print(f"{task.suite} task {task.number} trial {trial}: {problem}", flush=True)
        environment.close()
        members |= settled.pack_poses(task, rests)
    np.savez_compressed(OUT, **members)
    print(f"{OUT}: {OUT.stat().st_size / 2**20:.2f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
