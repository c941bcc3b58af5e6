"""What the words of an evaluation's command line stand for: simulators, policies, episodes.

A simulator is the name of a factory `function(task, settings) -> Environment`. If its module also
has `find_suite(name)`, its suites are used instead of LIBERO's; `point_world` is an example of
both. Results keep the words, so names stay what they are wherever the code behind them moves.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from deft_core.types import ServerInfo
from deft_libero.errors import SelectionError
from deft_libero.results.records import TrialKey
from deft_libero.simulator import suites
from deft_libero.simulator.assets import find_assets
from deft_libero.simulator.environment import Environment, EnvironmentSettings
from deft_libero.simulator.mujoco_version import refused_suites, warning
from deft_libero.simulator.suites import NUM_TRIALS, Suite, Task

LIBERO = "libero"
TRAINED = "trained"  # in place of task numbers: those the policy was trained on

_NAMED = {
    ("--environment", LIBERO): "deft_libero.simulator.environment:open_environment",
    ("--environment", "point_world"): "deft_libero.evaluation.point_world:open_environment",
    ("--local-policy", "solve"): "deft_libero.evaluation.point_world:solve",
    ("--local-policy", "plan"): "deft_libero.evaluation.point_world:plan",
}


def load_function(name: str, option: str) -> Callable[..., Any]:
    """The function `option` knows by that name, or as `module:function`; else SelectionError."""
    module, function_name = _place(name, option)
    try:
        function = getattr(import_module(module), function_name)
    except (ImportError, AttributeError) as error:
        raise SelectionError(f"{option} {name}: {error}") from error
    if not callable(function):
        raise SelectionError(f"{option} {name}: {function_name} is no function")
    found: Callable[..., Any] = function
    return found


def _place(name: str, option: str) -> tuple[str, str]:
    module, _, function = _NAMED.get((option, name), name).partition(":")
    if not module or not function:
        raise SelectionError(f"{option} takes module:function, got {name!r}")
    return module, function


def find_suite(simulator: str, name: str) -> Suite:
    """The suite of that name in that simulator."""
    load_function(simulator, "--environment")  # the error of an unusable name
    module = import_module(_place(simulator, "--environment")[0])
    find: Callable[[str], Suite] = getattr(module, "find_suite", suites.find_suite)
    return find(name)


def open_environment(simulator: str, task: Task, settings: EnvironmentSettings) -> Environment:
    """Build a task's environment."""
    factory: Callable[[Task, EnvironmentSettings], Environment] = load_function(
        simulator, "--environment"
    )
    return factory(task, settings)


def describe_assets(simulator: str, settings: EnvironmentSettings) -> str:
    """Which assets episodes would use, without starting the simulator."""
    if simulator != LIBERO:
        return f"those of {simulator.partition(':')[0]}"
    return find_assets(settings.assets_folder).label


def check_physics(
    simulator: str, settings: EnvironmentSettings, names: Sequence[str], version: str | None
) -> None:
    """Raise SelectionError for suites that this MuJoCo plays otherwise than LIBERO did."""
    if simulator != LIBERO or version is None:
        return
    if find_assets(settings.assets_folder).is_real:
        refused = refused_suites(names, version)
        if refused:
            raise SelectionError(
                f"{', '.join(refused)} cannot be trusted here: {warning(version)}, or give "
                "--any-mujoco to play nevertheless"
            )


def untrained_tasks(suite: Suite, info: ServerInfo | None) -> tuple[int, ...]:
    """Numbers of the tasks the policy was not trained on; none where it does not say."""
    if info is None or not info.instructions:
        return ()
    return tuple(one.number for one in suite.tasks if one.instruction not in info.instructions)


def trained_tasks(suite: Suite, info: ServerInfo | None) -> str:
    """The other tasks as `--tasks` takes them; SelectionError where there are none."""
    strange = untrained_tasks(suite, info)
    numbers = [str(one.number) for one in suite.tasks if one.number not in strange]
    if not numbers:
        raise SelectionError(
            f"the policy was trained on no task of {suite.name}; give numbers with --tasks to play "
            "them nevertheless"
        )
    return ",".join(numbers)


def held_out_trials(suite: Suite, info: ServerInfo | None) -> frozenset[int]:
    """Initial states that the policy keeps for its last evaluation; also of a suite's variants."""
    if info is None or suite.statistics_key not in info.held_out:
        return frozenset()
    text = info.held_out[suite.statistics_key]
    return frozenset(parse_numbers(text, NUM_TRIALS, f"the held-out states of {info.policy}"))


def parse_numbers(text: str, count: int, what: str) -> tuple[int, ...]:
    """The numbers in `0,3,40-49`, sorted; all of them must be below `count`."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise SelectionError(f"{what} takes numbers such as 0,3 or 40-49, got {text!r}")
        numbers.update(range(int(first), int(last or first) + 1))
    beyond = [number for number in numbers if number >= count]
    if beyond or not numbers:
        raise SelectionError(f"{what} go from 0 to {count - 1}, got {text!r}")
    return tuple(sorted(numbers))


def select_episodes(
    suite: Suite, tasks: str | None, trials: str | None, num_episodes: int | None
) -> tuple[TrialKey, ...]:
    """The asked episodes, trial by trial over all tasks, so that a part of them is a fair part."""
    count = len(suite.tasks)
    task_numbers = range(count) if tasks is None else parse_numbers(tasks, count, "--tasks")
    trial_numbers = (
        range(NUM_TRIALS) if trials is None else parse_numbers(trials, NUM_TRIALS, "--trials")
    )
    if num_episodes is not None and num_episodes < 1:
        raise SelectionError(f"--episodes must be at least 1, got {num_episodes}")
    keys = [TrialKey(suite.name, task, trial) for trial in trial_numbers for task in task_numbers]
    return tuple(keys[:num_episodes])
