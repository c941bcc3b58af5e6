"""`deft`: one command with a subcommand per job, each imported only when it is asked for."""

import sys
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Command:
    """A subcommand: the module whose `main(arguments)` returns an exit code, and its help."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("deft_server.commands.serve", "answer observations over HTTP and WebSocket"),
    "doctor": Command(
        "deft_server.commands.doctor", "say whether serving would work on this machine"
    ),
    "key": Command("deft_server.commands.key", "make an API key for a robot or an administrator"),
    "act": Command("deft_policies.commands.act", "answer pictures without a server"),
    "bench": Command("deft_policies.benchmark.command", "measure where the time of an answer goes"),
    "convert": Command(
        "deft_policies.commands.convert", "rewrite the pickles of an OFT fine-tune as safetensors"
    ),
    "index": Command("deft_policies.commands.index", "store frames and actions to draft from"),
    "train": Command("deft_draft_training.__main__", "make draft heads and small policies"),
    "replay": Command(
        "deft_server.commands.replay", "run recorded frames through a policy and compare"
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help"):
        print(_usage())
        return 0
    command = COMMANDS.get(given[0])
    if command is None:
        print(f"deft: unknown command {given[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    return int(import_module(command.module).main(given[1:]))


def _usage() -> str:
    lines = [f"  {name:<8} {command.summary}" for name, command in COMMANDS.items()]
    return (
        "usage: deft COMMAND [options]\n\n" + "\n".join(lines) + "\n\ndeft COMMAND --help for more"
    )


if __name__ == "__main__":
    raise SystemExit(main())
