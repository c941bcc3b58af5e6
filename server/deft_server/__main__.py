"""`deft`: what runs beside the policy."""

from deft_core.program import Command, Program

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
    "train": Command("deft_draft_training.__main__", "make draft heads and small policies"),
    "replay": Command(
        "deft_server.commands.replay", "run recorded frames through a policy and compare"
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    return Program("deft", COMMANDS, "deft-vla").run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
