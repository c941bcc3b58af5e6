"""Near top (TensorRT-LLM's relaxed acceptance): drafts nearly as likely as the best token.

d is accepted if it is among the target's N likeliest action tokens and p(d) >= max p - delta; N =
10, delta = 0.6.

Drafts: as `within-bins`.

Left out: TensorRT-LLM relaxes so while a model thinks. Here actions are relaxed, and words are
exact.

Numbers: docs/results/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deft_policies.decoding.acceptance.rule import DeviceRule, ScoredNodes, at_least_one

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NearTop(DeviceRule):
    """d is among the n likeliest and p(d) >= max p - delta (TensorRT-LLM's relaxed acceptance)."""

    n: int = 10
    delta: float = 0.6

    def __post_init__(self) -> None:
        at_least_one("n", self.n)

    needs_space = False  # it knows odds, and no distances

    def accepts(self, scored: ScoredNodes) -> Tensor:
        """Nearly as likely as the target's own token."""
        drafted, best = scored.drafted_log_probs, scored.action_log_probs.amax(dim=1)
        near = drafted.exp() >= best.exp() - self.delta
        return near & (drafted >= scored.kth_largest(self.n))


METHODS = {"near-top": "autoregressive:rule=near-top,plans=ours"}
RULES = {"near-top": NearTop}
