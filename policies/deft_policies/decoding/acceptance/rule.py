"""The interface of acceptance rules, and the rule that changes nothing: exact match."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from deft_policies.decoding.acceptance.scored import ScoredTree
from deft_policies.errors import RequestError


class AcceptanceRule(ABC):
    """Says which paths of a scored tree may be committed. Rules are immutable and share nothing."""

    @property
    def is_exact(self) -> bool:
        """Whether every accepted token equals the target's own."""
        return False

    @property
    def needs_patches(self) -> bool:
        """Whether the rule reads hidden states of the image patches, which cost extra work."""
        return False

    @property
    def drift_leak(self) -> float:
        """The share of a session's drift that stays after each step."""
        return 1.0

    @abstractmethod
    def accepts(self, scored: ScoredTree) -> Tensor:
        """True where the whole path from the root to the node may be committed, [row, node]."""

    @abstractmethod
    def with_radius(self, radius: int) -> "AcceptanceRule":
        """Return the rule with its radius in bins replaced; `RequestError` if it has none."""


@dataclass(frozen=True)
class ExactMatch(AcceptanceRule):
    """d = t: the output equals greedy decoding, whatever the drafts are.

    d is the drafted token and t the target's own. With sampled predictions instead of greedy ones
    the output has exactly the target's distribution: see `sampling`.
    """

    @property
    def is_exact(self) -> bool:
        """By definition."""
        return True

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Equal all the way."""
        return scored.whole_paths(scored.is_equal)

    def with_radius(self, radius: int) -> AcceptanceRule:
        """Only radius 0 is exact."""
        if radius == 0:
            return self
        raise RequestError(
            "radius",
            f"exact decoding has no radius, got {radius}; pick a relaxed method such as "
            "'deft' or 'spec-vla', or leave radius out",
        )
