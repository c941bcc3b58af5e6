"""Rewrites the pins in requirements/ci.txt from the environment it runs in.

Make a fresh one without the old pins first:
    make install install-libero VENV=.venv-pins PINS=
    .venv-pins/bin/python -m scripts.pin_requirements
Lines above the marker are written by hand and stay.
"""

import re
from importlib.metadata import distributions
from pathlib import Path

PINS = Path(__file__).parents[1] / "requirements" / "ci.txt"
MARKER = "# Everything else, as it was installed."
NOT_PINNED_HERE = {"pip", "setuptools", "deft-client", "deft-vla", "hf-libero", "robosuite", "bddl"}


def normalized(name: str) -> str:
    """Return a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Replace everything below the marker."""
    by_hand = PINS.read_text().partition(MARKER)[0]
    known = NOT_PINNED_HERE | {
        normalized(name) for name in re.findall(r"^([\w.-]+)==", by_hand, re.M)
    }
    found = {normalized(one.metadata["Name"]): one.version for one in distributions()}
    pins = [
        f"{name}=={version.partition('+')[0]}"
        for name, version in sorted(found.items())
        if name not in known
    ]
    PINS.write_text(by_hand + MARKER + "\n" + "\n".join(pins) + "\n")
    print(f"{len(pins)} pins written to {PINS}")


if __name__ == "__main__":
    main()
