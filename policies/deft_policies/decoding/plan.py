"""A plan: where the guesses of one action come from, and how wide its trees are."""

from dataclasses import dataclass

from deft_policies.decoding.kinds import DraftKind
from deft_policies.decoding.shapes import TreeShape


@dataclass(frozen=True)
class Plan:
    """What rides in the prefill (at most three kinds), and what drafts between later passes."""

    name: str
    prefill: tuple[DraftKind, ...] = ()
    rounds: tuple[DraftKind, ...] = ()
    shape: TreeShape = TreeShape()

    @property
    def kinds(self) -> frozenset[DraftKind]:
        """Every source it uses."""
        return frozenset(self.prefill + self.rounds)


PLAIN = Plan("plain")
