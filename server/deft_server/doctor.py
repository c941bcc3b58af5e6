"""`deft doctor`: would `deft serve` with the same flags work here, and if not, why?

Takes every flag of `deft serve`. Exit code 1 if something will not work.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from deft_client.libero.assets import find_assets, libero_folder
from deft_client.libero.cache import cache_folder
from deft_client.libero.errors import SimulationError
from deft_client.libero.graphics import Renderer, find_renderer
from deft_client.libero.mujoco_version import installed_mujoco, warning
from deft_policies.errors import PolicyError
from deft_policies.examination import Finding, Verdict
from deft_server.command_line import ServeCommand, read_command
from deft_server.machine import examine_machine
from deft_server.settings import SettingsError

_COLOURS = {Verdict.GOOD: "32", Verdict.DOUBTFUL: "33", Verdict.BAD: "31"}


def main(arguments: list[str]) -> int:
    """Examine, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="deft doctor",
        allow_abbrev=False,
        description="Say whether `deft serve` with the same flags would work on this machine.",
    )
    try:
        command = read_command(parser, arguments, os.environ)
    except (SettingsError, PolicyError) as error:
        sys.stdout.write(_lines([Finding("settings", Verdict.BAD, str(error))]))
        return 1
    findings = examine(command)
    sys.stdout.write(_lines(findings))
    num_bad = sum(one.verdict is Verdict.BAD for one in findings)
    num_doubtful = sum(one.verdict is Verdict.DOUBTFUL for one in findings)
    sys.stdout.write(f"{num_bad} errors, {num_doubtful} warnings\n")
    return 1 if num_bad else 0


def examine(command: ServeCommand) -> list[Finding]:
    """Look at the machine, the policy and the simulator."""
    policy = command.entry.examine(command.options)
    if not policy:
        policy = [Finding("policy", Verdict.GOOD, f"{command.policy_name} needs nothing")]
    return [*examine_machine(command.settings), *policy, *examine_simulator()]


def examine_simulator() -> list[Finding]:
    """Could LIBERO episodes be played here? Serving does not need it."""
    try:
        libero_folder()
        assets = find_assets(None, cache_folder())
    except SimulationError as error:
        return [Finding("simulator", Verdict.DOUBTFUL, f"{error} (evaluation only)")]
    findings = [Finding("assets", Verdict.GOOD, f"{assets.label} in {assets.folder}")]
    findings += _examine_mujoco()
    try:
        renderer = find_renderer(Renderer.AUTO)
    except SimulationError as error:
        return [*findings, Finding("graphics", Verdict.DOUBTFUL, f"{error} (evaluation only)")]
    return [*findings, Finding("graphics", Verdict.GOOD, f"renders with {renderer.value}")]


def _examine_mujoco() -> list[Finding]:
    version = installed_mujoco()
    if version is None:
        missing = "MuJoCo is not installed; run `make install-libero` (evaluation only)"
        return [Finding("mujoco", Verdict.DOUBTFUL, missing)]
    text = warning(version)
    if text:
        return [Finding("mujoco", Verdict.DOUBTFUL, text)]
    return [Finding("mujoco", Verdict.GOOD, version)]


def _lines(findings: Sequence[Finding]) -> str:
    width = max(len(one.subject) for one in findings)
    return "".join(
        f"{_painted(one.verdict)}  {one.subject:<{width}}  {one.text}\n" for one in findings
    )


def _painted(verdict: Verdict) -> str:
    word = f"{verdict.value:<7}"
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return word
    return f"\x1b[{_COLOURS[verdict]}m{word}\x1b[0m"
