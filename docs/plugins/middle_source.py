"""A draft source of one's own: the action will be no motion at all, the middle of every range."""

from deft_policies.decoding.drafts import DraftSource, Guesses
from deft_policies.decoding.sequence import Sequence
from deft_policies.decoding.target import Target


class MiddleSource(DraftSource):
    """Needs nothing but the range of action tokens."""

    kind = "middle"

    def __init__(self, target: Target) -> None:
        self.middle = (target.action_tokens.first + target.action_tokens.last) // 2

    def draft(self, sequence: Sequence, depth: int) -> Guesses:
        return [[self.middle] * depth]
