"""How the policy that ships was made: `python -m tiny_libero_recipe`; README.md explains."""

from deft_core.errors import DeftError
from deft_core.program import Command, Program
from deft_draft_training.errors import TrainingError
from deft_policies.errors import PolicyError

_HERE = "tiny_libero_recipe."
COMMANDS = {
    "demos": Command(_HERE + "demos", "record demonstrations with the scripted expert"),
    "train": Command(_HERE + "train", "clone demonstrations into a small OpenVLA"),
    "correct": Command(_HERE + "correct", "let a policy play, and store the expert's answers"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    program = Program(
        "python -m tiny_libero_recipe",
        COMMANDS,
        "deft-vla[models,training]",
        errors=(TrainingError, PolicyError, DeftError),
        when_interrupted="interrupted; the same command goes on from what was saved",
    )
    return program.run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
