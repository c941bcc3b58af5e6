"""An acceptance rule by probability: a draft stands where the target finds it nearly as likely."""

from dataclasses import dataclass

from torch import Tensor

from deft_policies.decoding.acceptance.rule import DeviceRule, ScoredNodes


@dataclass(frozen=True)
class LikelyRule(DeviceRule):
    """p(d) >= share * max p: the draft is at least `share` times as likely as the best token."""

    share: float = 0.5
    needs_space = False  # it reads probabilities, no distances

    def accepts(self, scored: ScoredNodes) -> Tensor:
        """Both sides speak of the token in the node's own place, as predicted at its parent."""
        best = scored.action_log_probs.amax(dim=1).exp()
        return scored.drafted_log_probs.exp() >= self.share * best
