"""What draft sources are given and what they return.

Two kinds. A guesser names whole actions, position by position; it needs no pass of any model, so
its guesses can ride in the prefill. A grower reads the target's hidden states, so it starts after
the prefill and grows a tree. Neither knows which rule will judge its guesses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from deft_policies.decoding.acceptance.verify import Verdict
from deft_policies.decoding.history import ActionHistory, HistoryTensors
from deft_policies.decoding.plan import DraftKind, TreeShape
from deft_policies.decoding.target import PromptFeatures, Prompts, Scores
from deft_policies.decoding.tree import DraftTree


@dataclass(frozen=True)
class PassResult:
    """One finished target pass."""

    tree: DraftTree
    scores: Scores
    predictions: Tensor  # [row, node]
    verdict: Verdict
    next_tokens: Tensor  # [row, step], token after each node of the path; the bonus is among them
    num_committed: Tensor  # [row], action tokens before the pass, the root included
    is_open: tuple[bool, ...]  # [row], whether the row still missed tokens before the pass
    is_prefill: bool = False


@dataclass(frozen=True)
class Progress:
    """How far a batch of actions has come."""

    tokens: Tensor  # [row, position + 1], committed; anything beyond `num_committed`
    num_committed: Tensor  # [row]
    roots: Tensor  # [row], the last committed token
    fewest: int  # of num_committed over unfinished rows, known to the host
    length: int  # tokens of one action
    last: PassResult | None  # None before the prefill

    @property
    def depth(self) -> int:
        """Levels of the deepest tree that is still of use: the last token needs no guess."""
        return self.length - 1 - self.fewest


@dataclass(frozen=True)
class Guesses:
    """Guessed actions of every row, aligned with positions. A guess stops at the first unknown."""

    tokens: Tensor  # [row, chain, position] int64
    is_known: Tensor  # [row, chain, position] bool


class Guesser(Protocol):
    """Names whole actions without running a model."""

    @property
    def kind(self) -> DraftKind:
        """Its name."""

    @property
    def steps_needed(self) -> int:
        """How many past steps of the session it reads."""

    @property
    def is_fixed(self) -> bool:
        """True if what it says before the prefill stays its answer for the whole action."""

    def can_guess(self, prompts: Prompts, histories: Sequence[ActionHistory]) -> bool:
        """False when there is nothing to guess from in any row."""

    def guess(self, prompts: Prompts, history: HistoryTensors, progress: Progress) -> Guesses:
        """Say what the action may be, given what is committed of it."""


class Grower(Protocol):
    """Grows trees from what the target computed. `begin`, then `grow` after every pass."""

    @property
    def kind(self) -> DraftKind:
        """Its name."""

    @property
    def needs_hidden(self) -> bool:
        """Whether `begin` reads the prompt's hidden states."""

    def begin(self, prompts: Prompts, features: PromptFeatures) -> None:
        """Start a batch of actions, after the prefill."""

    def grow(self, progress: Progress, shape: TreeShape) -> DraftTree:
        """Take in `progress.last`, then guess what follows the roots.

        No deeper than `progress.depth`, unless the shape is fixed.
        """
