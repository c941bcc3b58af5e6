"""What came of an attack, as a line for people or for programs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class AttackOutcome:
    """One attack: whether we held, what was measured, and what is wrong if anything is."""

    figures: Mapping[str, float]
    faults: tuple[str, ...] = ()
    skipped: str = ""  # why it could not be tried
    name: str = ""

    @property
    def verdict(self) -> str:
        """PASS, FAIL or SKIP."""
        return "SKIP" if self.skipped else "FAIL" if self.faults else "PASS"

    def as_text(self) -> str:
        """Return one line."""
        told = "  ".join(f"{name} {value:g}" for name, value in self.figures.items())
        said = self.skipped or "; ".join(self.faults[:2])
        return f"{self.verdict}  {self.name:38} {told}  {said}".rstrip()

    def as_json(self) -> str:
        """Return one line, of JSON."""
        return json.dumps({"verdict": self.verdict, **vars(self)})
