"""`deft train`: one subcommand per step from recorded episodes to a draft head."""

from deft_core.errors import DeftError
from deft_core.program import Command, Program
from deft_draft_training.errors import TrainingError
from deft_policies.errors import PolicyError

_COMMANDS = "deft_draft_training.commands."
COMMANDS = {
    "record": Command(_COMMANDS + "record", "a target's features over the episodes of data sets"),
    "fit": Command(_COMMANDS + "fit", "fit a draft head to recorded or live features"),
    "evaluate": Command(_COMMANDS + "evaluate", "judge draft heads on held-out episodes"),
    "export": Command(_COMMANDS + "export", "write a fitted head as the server loads it"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    program = Program(
        "deft train",
        COMMANDS,
        "deft-vla[models,training]",
        errors=(TrainingError, PolicyError, DeftError),
        when_interrupted="interrupted; the same command goes on from what was saved",
    )
    return program.run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
