"""`deft train`: one subcommand per step from demonstrations to a draft head or a small policy."""

import sys
from dataclasses import dataclass
from importlib import import_module

from deft_draft_training.errors import TrainingError
from deft_policies.errors import PolicyError


@dataclass(frozen=True)
class Command:
    """A subcommand: the module whose `main(arguments)` returns an exit code, and its help."""

    module: str
    summary: str


_HEADS = "deft_draft_training.heads."
_POLICY = "deft_draft_training.policy."
COMMANDS = {
    "record": Command(_HEADS + "record", "a target's features over demonstrations or recordings"),
    "fit": Command(_HEADS + "fit", "fit a draft head to recorded or live features"),
    "evaluate": Command(_HEADS + "evaluate", "judge draft heads on held-out episodes"),
    "export": Command(_HEADS + "export", "write a fitted head as the server loads it"),
    "policy": Command(_POLICY + "prepare", "clone demonstrations into a small OpenVLA"),
    "correct": Command(_POLICY + "correct", "let a policy play, and store the expert's answers"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help"):
        print(_usage())
        return 0
    command = COMMANDS.get(given[0])
    if command is None:
        print(f"deft train: unknown command {given[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        return int(import_module(command.module).main(given[1:]))
    except (TrainingError, PolicyError) as error:
        print(f"deft train {given[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130


def _usage() -> str:
    lines = [f"  {name:<8} {command.summary}" for name, command in COMMANDS.items()]
    header = "usage: deft train COMMAND [options]\n\n"
    return header + "\n".join(lines) + "\n\ndeft train COMMAND --help for more"


if __name__ == "__main__":
    raise SystemExit(main())
