"""Which episodes are asked for: `--tasks 0,3 --trials 40-49 --episodes 20`."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from deft_client.libero.results.errors import SelectionError
from deft_client.libero.results.records import EpisodeKey
from deft_client.libero.simulator.suites import NUM_TRIALS, Suite


def load_function(spec: str, option: str) -> Callable[..., Any]:
    """The function that `module:function` names; SelectionError names the option otherwise."""
    module, colon, name = spec.partition(":")
    if not colon or not module or not name:
        raise SelectionError(f"{option} takes module:function, got {spec!r}")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SelectionError(f"{option} {spec}: {error}") from error
    if not callable(function):
        raise SelectionError(f"{option} {spec}: {name} is no function")
    found: Callable[..., Any] = function
    return found


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
) -> tuple[EpisodeKey, ...]:
    """The asked episodes, trial by trial over all tasks, so that a part of them is a fair part."""
    count = len(suite.tasks)
    task_numbers = range(count) if tasks is None else parse_numbers(tasks, count, "--tasks")
    trial_numbers = (
        range(NUM_TRIALS) if trials is None else parse_numbers(trials, NUM_TRIALS, "--trials")
    )
    if num_episodes is not None and num_episodes < 1:
        raise SelectionError(f"--episodes must be at least 1, got {num_episodes}")
    keys = [EpisodeKey(suite.name, task, trial) for trial in trial_numbers for task in task_numbers]
    return tuple(keys[:num_episodes])
