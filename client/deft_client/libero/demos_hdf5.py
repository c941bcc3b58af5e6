"""Demonstrations in the HDF5 layout of LIBERO's own data sets; needs the package h5py."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from deft_client.libero.conventions import to_robosuite
from deft_client.libero.demonstrations import Demonstration, find_demonstrations, load_demonstration
from deft_client.libero.errors import DemonstrationError
from deft_client.libero.suites import find_task


def write_hdf5(demonstrations: Path, suite: str, task: int, folder: Path) -> Path:
    """Write the succeeded episodes of a task as `<task name>_demo.hdf5`; the path written.

    As in LIBERO's files, pictures are upside down and mirrored, actions are robosuite's, and the
    gripper's value is -1 open, +1 close. Executed actions are stored, and clean ones beside them.
    """
    try:
        h5py = importlib.import_module("h5py")
    except ImportError as error:
        raise DemonstrationError("HDF5 needs the package h5py: pip install h5py") from error
    wanted = find_task(suite, task)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{wanted.name}_demo.hdf5"
    aside = path.with_suffix(".part")
    with h5py.File(aside, "w") as file:
        data = file.create_group("data")
        number = total = 0
        for source in find_demonstrations(demonstrations, [task]):
            demonstration = load_demonstration(source)
            if demonstration.header.succeeded:
                _write_episode(data.create_group(f"demo_{number}"), demonstration)
                number, total = number + 1, total + len(demonstration)
        data.attrs["num_demos"], data.attrs["total"] = number, total
        data.attrs["bddl_file_name"] = f"{suite}/{wanted.bddl_file}"
        data.attrs["problem_info"] = f'{{"language_instruction": "{wanted.instruction}"}}'
    aside.replace(path)
    return path


def _write_episode(group: Any, demonstration: Demonstration) -> None:
    steps = len(demonstration)
    group.attrs["num_samples"] = steps
    group.attrs["init_state"] = demonstration.simulator[0]
    group["actions"] = _robosuite(demonstration.executed)
    group["clean_actions"] = _robosuite(demonstration.labels)
    group["states"] = demonstration.simulator
    group["dones"] = np.arange(steps) == steps - 1
    group["rewards"] = (np.arange(steps) == steps - 1).astype(np.uint8)
    observed = group.create_group("obs")
    frames = demonstration.frames()[:, ::-1, ::-1]
    observed.create_dataset("agentview_rgb", data=frames, compression="gzip", compression_opts=4)
    observed["ee_pos"] = demonstration.state[:, :3]
    observed["ee_ori"] = demonstration.state[:, 3:6]
    observed["ee_states"] = demonstration.state[:, :6]
    observed["gripper_states"] = demonstration.state[:, 6:]


def _robosuite(actions: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
    return np.stack([to_robosuite(action.astype(np.float64)) for action in actions])
