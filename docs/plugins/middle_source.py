"""A draft source of one's own: the action will be no motion at all, the middle of every range."""

import torch

from deft_policies.decoding.batch import Batch
from deft_policies.decoding.drafts import (
    MEMORY,
    Chains,
    DraftLimits,
    DraftSource,
    remaining_tokens,
)
from deft_policies.decoding.target import Target


class MiddleSource(DraftSource):
    """Needs past actions for their shape alone."""

    kind = "middle"
    needs = frozenset({MEMORY})
    capturable = True

    def __init__(self, target: Target) -> None:
        self.middle = (target.action_tokens.first + target.action_tokens.last) // 2

    def draft(self, batch: Batch, limits: DraftLimits) -> Chains:
        tokens = torch.full_like(batch.past[:, -1:], self.middle)
        return remaining_tokens(batch, tokens, torch.ones_like(tokens, dtype=torch.bool), limits)
