"""A program with a subcommand per job, each imported only when it is asked for."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module


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
    errors: tuple[type[Exception], ...] = ()
    when_interrupted: str = ""

    def run(self, arguments: list[str] | None) -> int:
        """Run a subcommand and return its exit code: 0 done, 1 it failed, 2 asked wrongly."""
        given = sys.argv[1:] if arguments is None else arguments
        if not given or given[0] in ("-h", "--help"):
            print(self._usage())
            return 0
        command = self.commands.get(given[0])
        if command is None:
            print(f"{self.name}: unknown command {given[0]!r}\n\n{self._usage()}", file=sys.stderr)
            return 2
        try:
            return int(import_module(command.module).main(given[1:]))
        except self.errors as error:
            print(f"{self.name} {given[0]}: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(self.when_interrupted, file=sys.stderr)
            return 130

    def _usage(self) -> str:
        lines = [f"  {name:<8} {command.summary}" for name, command in self.commands.items()]
        header = f"usage: {self.name} COMMAND [options]\n\n"
        return header + "\n".join(lines) + f"\n\n{self.name} COMMAND --help for more"
