"""A draft source of one's own: the action will be no motion at all, the middle of every range."""

from collections.abc import Sequence
from dataclasses import dataclass

from deft_policies.decoding.drafts.sources import Guesses
from deft_policies.decoding.history import ActionHistory, HistoryTensors
from deft_policies.decoding.plan import DraftKind
from deft_policies.decoding.records import BatchProgress
from deft_policies.decoding.target import Prompts, TargetModel


@dataclass(frozen=True)
class MiddleSource:
    """Knows nothing but the target; its kind is the name of the entry point."""

    target: TargetModel
    kind = DraftKind("middle")
    steps_needed = 0
    guesses_once = True

    def can_guess(self, prompts: Prompts, histories: Sequence[ActionHistory]) -> bool:
        """Say that there is always something to guess."""
        return True

    def guess(self, prompts: Prompts, history: HistoryTensors, progress: BatchProgress) -> Guesses:
        """Name one action, [row, chain, position]."""
        middle = (self.target.action_tokens.first + self.target.action_tokens.last) // 2
        tokens = (history.drift[:, None] * 0 + middle).long()
        return Guesses(tokens, tokens >= 0)
