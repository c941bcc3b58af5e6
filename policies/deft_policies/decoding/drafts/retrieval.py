"""Stored frames and the actions that belong to them: the index, and the source that reads it."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.decoding import kinds
from deft_policies.decoding.batch import Batch
from deft_policies.decoding.drafts import FRAME, DraftSource, remaining_tokens
from deft_policies.decoding.target import Prompts
from deft_policies.decoding.tree import Chains, DraftLimits
from deft_policies.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class RetrievalIndex:
    """Stored keys and actions. `fingerprint` names the target that made the keys."""

    keys: Tensor  # [entry, feature], unit length, float16 or float32
    actions: Tensor  # [entry, position] int64
    fingerprint: str

    def __post_init__(self) -> None:
        if self.keys.dim() != 2 or self.actions.dim() != 2:
            raise ValueError(
                "keys must be [entry, feature] and actions [entry, position], got "
                f"{list(self.keys.shape)} and {list(self.actions.shape)}"
            )
        if len(self.keys) != len(self.actions) or len(self.keys) == 0:
            raise ValueError(
                f"an index needs as many actions as keys and at least one, got {len(self.keys)} "
                f"keys and {len(self.actions)} actions"
            )

    def nearest(self, keys: Tensor, count: int) -> Tensor:
        """Actions of the `count` most similar entries, nearest first, [row, count, position]."""
        similar = keys.to(self.keys.dtype) @ self.keys.T
        best = similar.topk(min(count, len(self.keys)), dim=1).indices
        return self.actions[best]

    def check_length(self, lengths: Collection[int]) -> None:
        """Raise `CheckpointError` unless it holds actions of one of these lengths."""
        stored = self.actions.shape[1]
        if stored not in lengths:
            known = ", ".join(map(str, sorted(lengths)))
            raise CheckpointError(
                f"the retrieval index holds actions of {stored} tokens, this robot's have {known}; "
                "make an index of its own demonstrations"
            )


def frame_keys(prompts: Prompts) -> Tensor:
    """Keys of a batch of frames, [row, feature], float32.

    What the camera shows joined with what was asked, each at unit length: the same scene under two
    instructions calls for two actions.
    """
    if prompts.features is None:
        raise ValueError("retrieval needs the pooled visual features of the frames")
    positions = torch.arange(prompts.embeds.shape[1], device=prompts.embeds.device)
    is_patch = (positions >= prompts.patches.start) & (positions < prompts.patches.stop)
    is_text = (positions < prompts.lengths[:, None]) & ~is_patch
    words = (prompts.embeds.float() * is_text[:, :, None]).sum(dim=1) / is_text.sum(1, True)
    seen = functional.normalize(prompts.features.float(), dim=1)
    return functional.normalize(torch.cat((seen, functional.normalize(words, dim=1)), dim=1), dim=1)


def build_index(entries: Iterable[tuple[Tensor, Tensor]], fingerprint: str) -> RetrievalIndex:
    """Collect (keys [frame, feature], actions [frame, position]) of episodes into an index.

    Actions should be the target's own answers to those frames (recordings have them), or a
    demonstrator's. Kept in float16: an entry of a 7B model's frame is 12 kB.
    """
    keys, actions = [], []
    for key, action in entries:
        if len(key) != len(action):
            raise ValueError(f"{len(key)} frames come with {len(action)} actions")
        keys.append(functional.normalize(key.float(), dim=1).half().cpu())
        actions.append(action.long().cpu())
    if not keys:
        raise ValueError("no frames were given, so there is nothing to index")
    return RetrievalIndex(torch.cat(keys), torch.cat(actions), fingerprint)


class Retrieval(DraftSource):
    """The action will be the one stored with the most similar frame."""

    kind = kinds.RETRIEVAL
    needs = frozenset({FRAME})
    capturable = True

    def __init__(self, index: RetrievalIndex) -> None:
        self._index = index
        self._actions = self._is_known = torch.zeros(0)  # [row, 1, place]

    def allocate(self, batch: Batch) -> None:
        """An action for every row."""
        shape = (batch.capacity, 1, self._index.actions.shape[1])
        with torch.inference_mode(False):
            self._actions = torch.zeros(shape, dtype=torch.int64, device=batch.device)
            self._is_known = torch.zeros(shape, dtype=torch.bool, device=batch.device)

    def begin(self, batch: Batch, prompts: Prompts, hidden: Tensor | None) -> None:
        """Look the frames up."""
        for row in batch.rows:
            if row is not None and row.spec.is_action:
                self._index.check_length((row.spec.max_tokens,))
        self._is_known[batch.slots] = prompts.features is not None
        if prompts.features is not None:
            self._actions[batch.slots] = self._index.nearest(frame_keys(prompts), 1)

    def draft(self, batch: Batch, limits: DraftLimits) -> Chains:
        """What was found when the rows began."""
        actions, is_known = self._actions[batch.slots], self._is_known[batch.slots]
        return remaining_tokens(batch, actions, is_known, limits)
