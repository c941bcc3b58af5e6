"""Draft sources; here what a source of a package needs."""

from deft_policies.decoding.drafts.base import (
    FRAME,
    HIDDEN,
    LOGITS,
    MEMORY,
    PREDICTIONS,
    DraftSource,
    remaining_tokens,
)
from deft_policies.decoding.tree import Chains, DraftLimits, DraftTree

# Names of f28efa1, for one version more.
Room, from_here = DraftLimits, remaining_tokens

__all__ = [
    "FRAME",
    "HIDDEN",
    "LOGITS",
    "MEMORY",
    "PREDICTIONS",
    "Chains",
    "DraftLimits",
    "DraftSource",
    "DraftTree",
    "Room",
    "from_here",
    "remaining_tokens",
]
