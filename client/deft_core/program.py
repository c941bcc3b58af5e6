"""A program with a subcommand per job, each imported only when it is asked for."""

import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

OWN_PACKAGES = "deft_"


class CommandParser(ArgumentParser):
    """Says in two lines what is wrong with a command line, instead of listing all its flags."""

    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        for flag in (one.partition("=")[0] for one in unknown if one.startswith("--")):
            message += did_you_mean(flag, self._option_string_actions)
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help lists what may be given\n")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about a name that nobody knows, if one is much like it."""
    close = get_close_matches(given, known, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""


@dataclass(frozen=True)
class Command:
    """The module whose `main(arguments)` does the job and returns an exit code, and its help."""

    module: str
    summary: str


@dataclass(frozen=True)
class Program:
    """What is run by one name; `errors` are raised on purpose: one line and exit code 1."""

    name: str
    commands: Mapping[str, Command]
    requirement: str  # the distribution and the extras that every command needs
    errors: tuple[type[Exception], ...] = ()
    when_interrupted: str = ""  # where the interrupted command does not say what became of it

    def run(self, arguments: list[str] | None) -> int:
        """Run a subcommand and return its exit code: 0 done, 1 it failed, 2 asked wrongly."""
        given = sys.argv[1:] if arguments is None else arguments
        if not given or given[0] in ("-h", "--help"):
            print(self._usage())
            return 0
        if given[0] == "--version":
            distribution = self.requirement.partition("[")[0]
            print(f"{self.name} {distribution_version(distribution)}")
            return 0
        command = self.commands.get(given[0])
        if command is None:
            hint = did_you_mean(given[0], self.commands)
            known = ", ".join(self.commands)
            line = f"{self.name}: unknown command {given[0]!r}{hint}\nknown: {known}"
            print(line, file=sys.stderr)
            return 2
        try:
            return int(import_module(command.module).main(given[1:]))
        except ModuleNotFoundError as error:
            if (error.name or OWN_PACKAGES).startswith(OWN_PACKAGES):
                raise
            print(
                f"{self.name} {given[0]}: the package {error.name} is not installed\n"
                f"in a clone of Deft, pip install {self._places()} brings all that it needs",
                file=sys.stderr,
            )
            return 1
        except self.errors as error:
            print(f"{self.name} {given[0]}: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt as interrupt:
            print(str(interrupt) or self.when_interrupted, file=sys.stderr)
            return 130

    def _places(self) -> str:
        """What pip is to install from a clone: no index has these packages yet."""
        distribution, _, extras = self.requirement.partition("[")
        extras = f"[{extras}" if extras else ""
        client = distribution == "deft-client"
        if client:
            return f"'./client{extras}'"
        return f"./client '.{extras}'" if extras else "./client ."

    def _usage(self) -> str:
        lines = [f"  {name:<8} {command.summary}" for name, command in self.commands.items()]
        header = f"usage: {self.name} COMMAND [options]\n\n"
        return header + "\n".join(lines) + f"\n\n{self.name} COMMAND --help for more"


def distribution_version(name: str) -> str:
    """The version that is installed under a distribution's name."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "of a source tree that is not installed"
