"""The suites of LIBERO: step limits, statistics keys and tasks, in LIBERO's own order.

Only a table: nothing here touches the simulator, and no file is read before it is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from deft_client.libero.errors import UnknownSuiteError, UnknownTaskError

NUM_TRIALS = 50  # recorded initial states of every task


@dataclass(frozen=True)
class Task:
    """One task; `name` is the stem of its files, and holds the instruction."""

    suite: str
    number: int
    name: str

    @property
    def bddl_file(self) -> str:
        """Name of the file that defines scene and goal."""
        return f"{self.name}.bddl"

    @property
    def initial_states_file(self) -> str:
        """Name of the file with one initial state per trial."""
        return f"{self.name}.pruned_init"

    @property
    def instruction(self) -> str:
        """What the policy is told: from the file name, since the file's own text may differ."""
        _, separator, rest = self.name.partition("SCENE")
        words = rest.split("_")[1:] if separator else self.name.split("_")
        return " ".join(words)


@dataclass(frozen=True)
class Suite:
    """A set of tasks that share a step limit and action statistics."""

    name: str
    step_limit: int
    statistics_key: str
    tasks: Sequence[Task]

    def task(self, number: int) -> Task:
        """The task of that number, or UnknownTaskError."""
        if not 0 <= number < len(self.tasks):
            raise UnknownTaskError(self.name, number, len(self.tasks))
        return self.tasks[number]


_STEP_LIMITS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
SUITE_NAMES = tuple(_STEP_LIMITS)


@cache
def find_suite(name: str) -> Suite:
    """The suite of that name, or UnknownSuiteError with the nearest one."""
    if name not in _STEP_LIMITS:
        raise UnknownSuiteError(name, SUITE_NAMES)
    text = files("deft_client.libero.simulator").joinpath("tasks", f"{name}.txt").read_text("utf-8")
    names = text.split()
    tasks = tuple(Task(name, number, task) for number, task in enumerate(names))
    return Suite(name, _STEP_LIMITS[name], name, tasks)


def find_task(suite: str, number: int) -> Task:
    """The task of that number in that suite."""
    return find_suite(suite).task(number)
