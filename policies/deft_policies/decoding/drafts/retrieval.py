"""Guesses from stored frames: what was done when the camera last saw something like this."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deft_policies.decoding.drafts.source import Guesses, Progress
from deft_policies.decoding.history import ActionHistory, HistoryTensors
from deft_policies.decoding.kinds import DraftKind
from deft_policies.decoding.retrieval import RetrievalIndex, frame_keys
from deft_policies.decoding.target import Prompts


@dataclass(frozen=True)
class Retrieval:
    """The action will be one of those stored with the `count` most similar frames."""

    index: RetrievalIndex
    count: int = 1
    kind = DraftKind.RETRIEVAL
    steps_needed = 0
    is_fixed = True

    def can_guess(self, prompts: Prompts, histories: Sequence[ActionHistory]) -> bool:
        """True where frames have features at all."""
        return prompts.features is not None

    def guess(self, prompts: Prompts, history: HistoryTensors, progress: Progress) -> Guesses:
        """Look the frames up."""
        tokens = self.index.nearest(frame_keys(prompts), self.count)
        return Guesses(tokens, torch.ones_like(tokens, dtype=torch.bool))
