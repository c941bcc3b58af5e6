"""What a task asks for, read from its file without starting the simulator."""

import re

from deft_client.libero.errors import SimulationError
from deft_client.libero.simulator.assets import libero_folder
from deft_client.libero.simulator.scene import Goal
from deft_client.libero.simulator.suites import Task

_PREDICATE = re.compile(r"\((\w+)\s+(\w+)(?:\s+(\w+))?\s*\)")


def read_goals(task: Task) -> tuple[Goal, ...]:
    """The predicates that must all hold for an episode of the task to succeed."""
    path = libero_folder() / "bddl_files" / task.suite / task.bddl_file
    try:
        goal = path.read_text("utf-8").partition("(:goal")[2]
    except OSError as error:
        raise SimulationError(f"{path} cannot be read: {error.strerror}") from error
    found = _PREDICATE.findall(goal)
    return tuple(Goal(name.lower(), subject, target or None) for name, subject, target in found)
