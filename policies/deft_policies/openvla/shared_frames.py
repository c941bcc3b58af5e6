"""A policy that many methods ask about the same frames, one after the other.

What is the same for several of them is computed once: the vision towers, the prompt's pass through
the decoder, and every pass over the same tree behind the same tokens. Guesses that ride in the
prefill are scored behind the prompt's kept slots instead, so that logits may differ in the last
bits; tokens are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from deft_client.types import Observation
from deft_policies.decoding.records import StageClock
from deft_policies.decoding.target import PromptFeatures, Prompts, Scores
from deft_policies.decoding.tree import DraftTree
from deft_policies.openvla.policy import OpenVLAPolicy, PolicyParts
from deft_policies.openvla.target import OpenVLATarget


def sharing_frames(policy: OpenVLAPolicy) -> OpenVLAPolicy:
    """The same policy for replays: the last batch of frames is remembered, times mean nothing.

    As it is where passes are captured: they are fast, and their memory is their own.
    """
    parts = policy.parts
    if parts.target.runner.reserve is not None:
        return policy
    known = {one.name: getattr(parts, one.name) for one in fields(PolicyParts)}
    shared = SharedParts(**{**known, "target": SharingTarget.over(parts.target)})
    return OpenVLAPolicy(shared, policy.settings)


@dataclass(eq=False)
class LastRead:
    """The batch of frames that was read last. Holds the observations, so that they stay apart."""

    observations: Sequence[Observation] = ()
    prompts: Prompts | None = None

    def is_of(self, observations: Sequence[Observation]) -> bool:
        """Whether it is the same objects in the same order."""
        return len(observations) == len(self.observations) and all(
            one is other for one, other in zip(observations, self.observations, strict=True)
        )


@dataclass(frozen=True)
class SharedParts(PolicyParts):
    """Reads a batch of frames that comes again no second time."""

    last: LastRead = field(default_factory=LastRead)

    def read(self, observations: Sequence[Observation], clock: StageClock) -> Prompts:
        """What the decoder starts from: the same object for the same batch."""
        if self.last.prompts is None or not self.last.is_of(observations):
            self.last.prompts = super().read(observations, clock)
            self.last.observations = tuple(observations)
        return self.last.prompts


@dataclass(frozen=True)
class KnownPass:
    """What a pass said, and what it left in the cache."""

    scores: Scores
    slots: Tensor  # [layer, row, node, ...]


class SharingTarget(OpenVLATarget):
    """Runs no pass a second time: passes are known by all that came before them since the prompt.

    Forgets when other prompts come.
    """

    _embeds: Tensor | None = None  # of the prompts that it knows
    _prompt: Tensor  # what they left in the cache
    _seen: tuple[Scores, PromptFeatures]
    _known: dict[bytes, KnownPass]
    _history: bytes = b""  # trees and paths since the prompt

    @staticmethod
    def over(target: OpenVLATarget) -> "SharingTarget":
        """On the same weights."""
        rows_only = len(target.vocabulary) < target.num_tokens
        return SharingTarget(target.model, action_rows_only=rows_only, runner=target.runner)

    @torch.no_grad()
    def prefill(self, prompts: Prompts, tree: DraftTree) -> tuple[Scores, PromptFeatures]:
        """The prompts' scores and slots, and one narrow pass for the guesses behind them."""
        num_rows, num_positions = prompts.embeds.shape[:2]
        if prompts.embeds is not self._embeds:
            root = DraftTree.root_only(prompts.last_tokens)
            self._seen = super().prefill(replace(prompts, keep_hidden=True), root)
            self._prompt = self._cache.data[:, :num_rows, :num_positions].clone()
            self._embeds, self._known = prompts.embeds, {}
        self._begin(prompts.lengths, num_positions, num_positions)
        self._cache.data[:, :num_rows, :num_positions] = self._prompt
        self._history = b""
        scores, features = self._seen
        if tree.num_nodes == 1:
            return scores, features
        # The last position is read again, as the root of the guesses.
        nothing = torch.zeros_like(prompts.lengths)
        self.commit(nothing[:, None], nothing)
        return self.score(tree), features

    @torch.no_grad()
    def score(self, tree: DraftTree) -> Scores:
        """One pass, or what it said and left when it was run."""
        if not self._extent.is_exact:  # rows of a batch that have come apart
            return super().score(tree)
        self._history += _bytes(tree.tokens, tree.parents)
        start = self._extent.longest
        slots = self._cache.data[:, : len(tree.tokens), start : start + tree.num_nodes]
        known = self._known.get(self._history)
        if known is None:
            known = KnownPass(super().score(tree), slots.clone())
            self._known[self._history] = known
        self._roots.copy_(self._lengths)
        slots.copy_(known.slots)
        return known.scores

    @torch.no_grad()
    def commit(self, path: Tensor, lengths: Tensor) -> None:
        """Keep a path, and remember which."""
        self._history += _bytes(path[:, : int(lengths.max())], lengths)
        super().commit(path, lengths)


def _bytes(*tensors: Tensor) -> bytes:
    """Integers of known shapes, as a key."""
    return b"".join(f"{tuple(one.shape)}".encode() + one.numpy().tobytes() for one in tensors)
