"""The suites of LIBERO and LIBERO-PRO: step limits, statistics keys, tasks in LIBERO's own order.

Only a table: nothing here touches the simulator, and no file is read before it is asked for.

LIBERO-PRO has four variants of each of four suites, with files of the same names: `_swap` exchanges
the places of things, `_object` their looks, `_lan` says the same in other words, and `_task` asks
for something else.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from deft_core.program import did_you_mean
from deft_libero.errors import AssetsError, SelectionError
from deft_libero.simulator.assets import libero_folder

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
        return f"{self.name}.pruned_init{'.npz' if self.suite in PRO_SUITES else ''}"

    @property
    def instruction(self) -> str:
        """What the policy is told: from the file name, since the file's own text may differ.

        Where LIBERO-PRO asks in other words, or for something else, only the file says so.
        """
        if self.suite in PRO_SUITES and self.suite.endswith(("_lan", "_task")):
            return _language_of(self.suite, self.bddl_file)
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
        """The task of that number, or SelectionError."""
        if not 0 <= number < len(self.tasks):
            raise SelectionError(f"{self.name} has tasks 0 to {len(self.tasks) - 1}, got {number}")
        return self.tasks[number]


_STEP_LIMITS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
PRO_SUITES = tuple(
    f"{base}_{variant}"
    for base in ("libero_spatial", "libero_object", "libero_goal", "libero_10")
    for variant in ("swap", "object", "lan", "task")
)
SUITE_NAMES = tuple(_STEP_LIMITS)  # of LIBERO itself


@cache
def _language_of(suite: str, bddl_file: str) -> str:
    path = libero_folder(suite) / "bddl_files" / suite / bddl_file
    found = re.search(r"\(:language\s+([^)]+?)\s*\)", path.read_text("utf-8"))
    if found is None:
        raise AssetsError(f"{path} does not say what is asked for")
    return " ".join(found[1].split())


@cache
def find_suite(name: str) -> Suite:
    """The suite of that name, or SelectionError with the nearest one."""
    known = (*SUITE_NAMES, *PRO_SUITES)
    if name not in known:
        hint = did_you_mean(name, known)
        raise SelectionError(f"unknown suite {name!r}; known suites: {', '.join(known)}{hint}")
    base = name.rpartition("_")[0] if name in PRO_SUITES else name
    text = files("deft_libero.simulator").joinpath("tasks", f"{base}.txt").read_text("utf-8")
    names = text.split()
    tasks = tuple(Task(name, number, task) for number, task in enumerate(names))
    return Suite(name, _STEP_LIMITS[base], base, tasks)


def find_task(suite: str, number: int) -> Task:
    """The task of that number in that suite."""
    return find_suite(suite).task(number)
