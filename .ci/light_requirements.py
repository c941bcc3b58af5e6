"""Print what the tests of the client and the server need: everything but what comes with torch."""

import re
import tomllib
from pathlib import Path

HEAVY = r"deft-client|torch|transformers|triton"
REPORTS = r"jinja2|imageio"  # of the simulator's packages


def main() -> None:
    root = Path(__file__).parents[1]
    ours, client = (
        tomllib.loads((root / name / "pyproject.toml").read_text())["project"]
        for name in (".", "client")
    )
    needed = [*ours["dependencies"], *ours["optional-dependencies"]["dev"]]
    light = [one for one in needed if not re.match(HEAVY, one)]
    simulator = client["optional-dependencies"]["simulator"]
    print(*light, *(one for one in simulator if re.match(REPORTS, one)), sep="\n")


if __name__ == "__main__":
    main()
