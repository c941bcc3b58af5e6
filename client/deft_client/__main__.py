"""`deft-client`: one command with a subcommand per job, each imported only when it is asked for."""

import sys
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Command:
    """A subcommand: the module whose `main(arguments)` returns an exit code, and its help."""

    module: str
    summary: str


COMMANDS = {
    "ping": Command("deft_client.commands.ping", "ask a server whether it is ready, and how far"),
    "act": Command("deft_client.commands.act", "send one picture, print the actions"),
    "eval": Command("deft_client.libero.commands.evaluate", "play LIBERO episodes, keep results"),
    "report": Command("deft_client.libero.commands.report", "results to a page, a table and CSV"),
    "assets": Command("deft_client.libero.commands.assets", "build, show or check LIBERO's assets"),
    "demos": Command("deft_client.libero.commands.demos", "record demonstrations with the expert"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand and return its exit code: 0 done, 1 it failed, 2 asked wrongly."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help"):
        print(_usage())
        return 0
    command = COMMANDS.get(given[0])
    if command is None:
        print(f"deft-client: unknown command {given[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        return int(import_module(command.module).main(given[1:]))
    except KeyboardInterrupt:
        return 130


def _usage() -> str:
    lines = [f"  {name:<8} {command.summary}" for name, command in COMMANDS.items()]
    return (
        "usage: deft-client COMMAND [options]\n\n"
        + "\n".join(lines)
        + "\n\ndeft-client COMMAND --help for more"
    )


if __name__ == "__main__":
    raise SystemExit(main())
