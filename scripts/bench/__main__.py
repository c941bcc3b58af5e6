"""What a clone can measure: `python -m scripts.bench`."""

from deft_core.program import Command, Program

_HERE = "scripts.bench."
COMMANDS = {
    "decoding": Command(_HERE + "decoding", "deft bench, beside scripted drafts"),
    "gpu": Command(_HERE + "gpu_run", "a short run on a GPU: bits, passes, frames, memory"),
    "server": Command(_HERE + "server", "what the server and its replicas add to a policy's time"),
    "network": Command(_HERE + "network", "robots behind a network that is late and cuts"),
    "rate": Command(_HERE + "rate", "actions a second of one arm, by a loop and by waiting"),
    "sim": Command(_HERE + "sim", "steps and frames of the simulator"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    program = Program("python -m scripts.bench", COMMANDS, "deft-vla[models,server,ray]")
    return program.run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
