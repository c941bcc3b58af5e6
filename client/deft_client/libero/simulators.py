"""Which simulator an evaluation runs in: LIBERO, or another one by the name of its factory.

A factory is `function(task, settings) -> Environment`. If its module also has `find_suite(name)`,
its suites are used instead of LIBERO's; `point_world` is an example of both.
"""

from collections.abc import Callable, Sequence
from importlib import import_module

from deft_client.libero import suites
from deft_client.libero.assets import AssetsKind, find_assets
from deft_client.libero.cache import cache_folder
from deft_client.libero.environment import Environment, EnvironmentSettings
from deft_client.libero.evaluate_errors import SelectionError
from deft_client.libero.factories import load_function
from deft_client.libero.mujoco_version import refused_suites, warning
from deft_client.libero.suites import Suite, Task

LIBERO = "deft_client.libero.environment:open_environment"

EnvironmentFactory = Callable[[Task, EnvironmentSettings], Environment]


def find_suite(simulator: str, name: str) -> Suite:
    """The suite of that name in that simulator."""
    load_function(simulator, "--environment")  # the error of an unusable name
    module = import_module(simulator.partition(":")[0])
    find: Callable[[str], Suite] = getattr(module, "find_suite", suites.find_suite)
    return find(name)


def open_environment(simulator: str, task: Task, settings: EnvironmentSettings) -> Environment:
    """Build a task's environment."""
    factory: EnvironmentFactory = load_function(simulator, "--environment")
    return factory(task, settings)


def describe_assets(simulator: str, settings: EnvironmentSettings) -> str:
    """Which assets episodes would use, without starting the simulator."""
    if simulator != LIBERO:
        return f"those of {simulator.partition(':')[0]}"
    return find_assets(settings.assets_folder, cache_folder(settings.cache)).label


def check_physics(
    simulator: str, settings: EnvironmentSettings, names: Sequence[str], version: str | None
) -> None:
    """Raise SelectionError for suites that this MuJoCo plays otherwise than LIBERO did."""
    if simulator != LIBERO or version is None:
        return
    if find_assets(settings.assets_folder, cache_folder(settings.cache)).kind is AssetsKind.REAL:
        refused = refused_suites(names, version)
        if refused:
            raise SelectionError(
                f"{', '.join(refused)} cannot be trusted here: {warning(version)}, or give "
                "--any-mujoco to play nevertheless"
            )
