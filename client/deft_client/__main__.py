"""`deft-client`: what runs beside the robot."""

from deft_core.program import Command, Program

COMMANDS = {
    "ping": Command("deft_client.commands.ping", "ask a server whether it is ready, and how far"),
    "act": Command("deft_client.commands.act", "send one picture, print the actions"),
    "load": Command("deft_client.commands.load", "how well a server answers a fleet of robots"),
    "eval": Command("deft_libero.commands.evaluate", "play LIBERO episodes, keep results"),
    "report": Command("deft_libero.commands.report", "results to a page, a table and CSV"),
    "compare": Command("deft_libero.commands.compare", "two runs: what may be concluded"),
    "assets": Command("deft_libero.commands.assets", "build, show or check LIBERO's assets"),
    "datasets": Command(
        "deft_client.commands.datasets", "say what a data set holds, or export it for LeRobot"
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    return Program("deft-client", COMMANDS, "deft-client[libero]").run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
