"""Top k (SpecDec, Xia et al. 2022): drafts among the target's k likeliest.

d is accepted if it is among the k likeliest action tokens of the target, k = 5. It knows odds and
no distances: a likely token may lie at the other end of the range.

Drafts: as `within-bins`.

Left out: the paper's own drafter, and its bound on how much less likely than the best a draft may
be, which is `near-top`.

Numbers: docs/results/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deft_policies.decoding.acceptance.rule import DeviceRule, ScoredNodes, at_least_one

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TopK(DeviceRule):
    """d is among the k likeliest action tokens of the target (SpecDec, Xia et al. 2022)."""

    k: int = 5

    def __post_init__(self) -> None:
        at_least_one("k", self.k)

    needs_space = False  # it knows odds, and no distances

    def accepts(self, scored: ScoredNodes) -> Tensor:
        """Likely enough by rank."""
        return scored.drafted_log_probs >= scored.kth_largest(self.k)


METHODS = {"top-k": "autoregressive:rule=top-k,plans=ours"}
RULES = {"top-k": TopK}
