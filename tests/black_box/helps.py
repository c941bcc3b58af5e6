"""What every command says of itself. To remove or move a command, change its line here."""

from tests.black_box.product import CLIENT, SERVER, run

# The name of the recording, where the command's `main` is, and its arguments.
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "deft": (SERVER, ()),
    "deft serve": (SERVER, ("serve",)),
    "deft serve constant": (SERVER, ("serve", "--policy", "constant")),
    "deft serve sleeping": (SERVER, ("serve", "--policy", "sleeping")),
    "deft serve openvla": (SERVER, ("serve", "--policy", "openvla")),
    "deft serve oft": (SERVER, ("serve", "--policy", "oft")),
    "deft doctor": (SERVER, ("doctor",)),
    "deft key": (SERVER, ("key",)),
    "deft act": (SERVER, ("act",)),
    "deft bench": (SERVER, ("bench",)),
    "deft convert": (SERVER, ("convert",)),
    "deft replay": (SERVER, ("replay",)),
    "deft train": (SERVER, ("train",)),
    "deft train record": (SERVER, ("train", "record")),
    "deft train fit": (SERVER, ("train", "fit")),
    "deft train evaluate": (SERVER, ("train", "evaluate")),
    "deft train export": (SERVER, ("train", "export")),
    "deft-client": (CLIENT, ()),
    "deft-client ping": (CLIENT, ("ping",)),
    "deft-client act": (CLIENT, ("act",)),
    "deft-client load": (CLIENT, ("load",)),
    "deft-client eval": (CLIENT, ("eval",)),
    "deft-client report": (CLIENT, ("report",)),
    "deft-client compare": (CLIENT, ("compare",)),
    "deft-client assets": (CLIENT, ("assets",)),
    "deft-client datasets": (CLIENT, ("datasets",)),
    "scripts.bench decoding": ("scripts.bench.decoding", ()),
    "scripts.reproduce": ("scripts.reproduce.__main__", ()),
}


def said_by(name: str) -> str:
    """Its help, and what it answers to a flag and a word that it does not know."""
    module, arguments = COMMANDS[name]
    told = []
    for asked in ("--help", "--no-such-flag"):
        ended = run(module, *arguments, asked)
        told.append(f"$ {name} {asked}\nexit code {ended.code}\n{ended.out}{ended.err}")
    return "\n".join(told)
