"""Acceptance rules: what they read, what they answer, and the exact one.

A rule reads a draft tree with everything that the target computed for it. No rule imports torch
when it is imported, so that methods are listed and checked without it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar

from deft_policies.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from deft_policies.decoding.acceptance.numbers import WrittenNumbers
    from deft_policies.decoding.target import Scores
    from deft_policies.decoding.tree import DraftTree
    from deft_policies.model.sizes import TokenRange


class DimensionGroup(IntEnum):
    """Positions that share a unit and a limit."""

    MOVE = 0  # unit: millimetres per step
    TURN = 1  # unit: degrees per step
    GRIP = 2  # judged by its class where the space names a boundary


@dataclass(frozen=True)
class ActionSpace:
    """One action, token by token. All tuples are [position].

    `unit_per_bin` is how far the robot moves when a token moves by one bin, 0.0 where that is
    unknown or nothing. Tokens at or above `class_boundary` belong to one class and tokens below it
    to the other; None where a position has no classes.
    Where positions are numbers written as text, 0 to `largest_number`, a bin is a number.
    """

    groups: tuple[DimensionGroup, ...]
    unit_per_bin: tuple[float, ...]
    class_boundary: tuple[int | None, ...]
    largest_number: int = 0  # 0: positions are tokens

    def __post_init__(self) -> None:
        lengths = {len(self.groups), len(self.unit_per_bin), len(self.class_boundary)}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(f"the tuples of an action space differ in length: {sorted(lengths)}")
        if any(size < 0 or size != size for size in self.unit_per_bin):
            raise ValueError(f"unit_per_bin must be >= 0, got {self.unit_per_bin}")

    @property
    def length(self) -> int:
        """Tokens of one action."""
        return len(self.groups)

    def with_more(self, positions: int) -> ActionSpace:
        """The space with further positions behind, which are like its last one."""
        return ActionSpace(
            self.groups + self.groups[-1:] * positions,
            self.unit_per_bin + self.unit_per_bin[-1:] * positions,
            self.class_boundary + self.class_boundary[-1:] * positions,
            self.largest_number,
        )

    @staticmethod
    def in_bins(length: int) -> ActionSpace:
        """A space whose units are unknown: every limit is then a number of bins."""
        return ActionSpace((DimensionGroup.MOVE,) * length, (0.0,) * length, (None,) * length)


NO_CLASS = -1  # stands for None in `ActionContext.class_boundary`


@lru_cache(maxsize=64)
def space_tensors(
    spaces: tuple[ActionSpace, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The first fields of an `ActionContext` for spaces of the same length. Not to be written to.

    Remembered, because sessions act in the same space again and again.
    """
    import torch

    units = [space.unit_per_bin for space in spaces]
    boundaries = [
        [NO_CLASS if edge is None else edge for edge in space.class_boundary] for space in spaces
    ]
    with torch.inference_mode(False):
        groups = torch.tensor([space.groups for space in spaces], device=device)
        unit_per_bin = torch.tensor(units, dtype=torch.float32, device=device)
        return groups, unit_per_bin, torch.tensor(boundaries, device=device)


@dataclass(frozen=True)
class ActionContext:
    """What rules may know beyond the tree: fixed for one action, the same for all its passes."""

    groups: Tensor  # [row, position] int64, `DimensionGroup`
    unit_per_bin: Tensor  # [row, position] float32
    class_boundary: Tensor  # [row, position] int64, NO_CLASS where there are no classes
    drift: Tensor  # [row, position] float32, executed minus own over past steps, in bins
    num_steps: Tensor  # [row] int64, steps since the episode began
    patches: Tensor | None = None  # [row, patch, width], hidden states of the image patches

    @property
    def length(self) -> int:
        """Tokens of one action."""
        return self.groups.shape[1]

    @property
    def space(self) -> ActionContext:
        """Itself: where rules written for f28efa1 find the first three fields."""
        return self


@dataclass(frozen=True)
class ScoredTree:
    """One tree after its pass. `spent` is how far this action has already been relaxed.

    The drafted token of a node is judged against `expected`: the prediction made at its parent.
    """

    tree: DraftTree
    scores: Scores
    predictions: Tensor  # [row, node], the target's token after each node
    num_committed: Tensor  # [row], action tokens up to the root, the root included
    spent: Tensor  # [row, position] int64, executed minus own at committed positions, in bins
    vocabulary: TokenRange
    action_tokens: TokenRange
    context: ActionContext
    num_tokens: int | None = None  # of the model's whole vocabulary; None: `vocabulary` is all
    limit: Tensor | None = None  # [row], tokens of the answer; None: as many as the space has
    begin: Tensor | None = None  # [row], where an action after text begins; below 0: no text
    stop: Tensor | None = None  # [row], the token that ends a text
    written: Sequence[WrittenNumbers | None] = ()  # [row], where the rule reads numbers

    @cached_property
    def parents(self) -> Tensor:
        """Parents to gather with: the root stands for its own parent. [row, node]."""
        return self.tree.parents.clamp(min=0)

    @cached_property
    def expected(self) -> Tensor:
        """The target's token in the node's own place, [row, node]: predicted at its parent."""
        return self.predictions.gather(1, self.parents)

    @cached_property
    def deviations(self) -> Tensor:
        """Drafted minus expected, in bins, [row, node]; meaningful between action tokens."""
        return self.tree.tokens - self.expected

    @cached_property
    def is_equal(self) -> Tensor:
        """True where the draft is what the target says, [row, node]."""
        return self.tree.tokens == self.expected

    @cached_property
    def is_relaxable(self) -> Tensor:
        """True where drafted and expected are both action tokens, [row, node]."""
        inside = self.action_tokens.contains(self.tree.tokens)
        return inside & self.action_tokens.contains(self.expected)

    def relaxable(self, words: bool) -> Tensor:
        """`is_relaxable`; with `words` also where both are words of a text. [row, node]."""
        return self.is_relaxable | self.is_word if words else self.is_relaxable

    @cached_property
    def is_text(self) -> Tensor | None:
        """True for rows whose answer is text that ends in an action, [row, 1]; None: none is."""
        return None if self.begin is None else (self.begin >= 0)[:, None]

    @cached_property
    def is_word(self) -> Tensor:
        """True where drafted and expected are both words of a text, [row, node].

        Neither is an action token, and neither is the token that ends the text.
        """
        tokens, expected = self.tree.tokens, self.expected
        if self.is_text is None:
            return tokens < 0
        words = ~(self.action_tokens.contains(tokens) | self.action_tokens.contains(expected))
        if self.stop is not None:
            stop = self.stop[:, None]
            words = words & (tokens != stop) & (expected != stop)
        return words & self.is_text

    @cached_property
    def positions(self) -> Tensor:
        """Which token of the action each node would become, [row, node]; clamped into it."""
        places = self.num_committed.unsqueeze(1) + (self.tree.depths() - 1)
        if self.begin is not None:
            places = self._behind_text(places)
        return places.clamp_(0, self.context.length - 1)

    def _behind_text(self, places: Tensor) -> Tensor:
        """Places in an action that begins where the last text ends: in the tree, or before it."""
        assert self.begin is not None
        depths = self.tree.depths()
        above = self.tree.ancestor_mask() & (depths[:, None, :] < depths[:, :, None])
        text = ~self.action_tokens.contains(self.tree.tokens)
        last = (depths + 1).where(text, 0)[:, None, :].where(above, 0).amax(dim=2)
        in_tree = depths - last  # action tokens above the node since the last text in the tree
        begin = self.begin[:, None]
        behind = in_tree.where(last > 0, places - begin)
        return places.where(begin < 0, behind)

    @property
    def deepest(self) -> Tensor:
        """Depth of the last guess that may count, [row]: the answer's last token needs none."""
        length = self.context.length if self.limit is None else self.limit
        return length - 1 - self.num_committed

    def at_positions(self, values: Tensor) -> Tensor:
        """Look a [row, position] table up for every node, [row, node]."""
        return values.gather(1, self.positions)

    def whole_paths(self, local: Tensor) -> Tensor:
        """True where a node and all its ancestors below the root are true, [row, node]."""
        fine = (local & self.tree.is_real) | (self.tree.parents < 0)
        return (self.tree.ancestor_mask() <= fine.unsqueeze(1)).all(dim=2)

    def relaxed_paths(self, near: Tensor) -> Tensor:
        """Whole paths of tokens that are equal, or near where they may be relaxed."""
        return self.whole_paths(self.is_equal | (near & self.is_relaxable))

    def sum_along_paths(self, values: Tensor) -> Tensor:
        """Sum [row, node] values over each node's path, the root left out; float32 [row, node]."""
        below = self.tree.ancestor_mask()[:, :, 1:].float()
        return (below @ values[:, 1:, None].float()).squeeze(2)

    @cached_property
    def action_log_probs(self) -> Tensor:
        """The target's log-probabilities after each node over action tokens alone.

        [row, node, bin]. Conditioned on an action token, so that a threshold means the same
        whether the target computes its whole vocabulary or only these rows.
        """
        columns = self.action_tokens.within(self.vocabulary)
        return self.scores.logits[:, :, columns].log_softmax(dim=2)

    @cached_property
    def expected_log_probs(self) -> Tensor:
        """The log-probabilities by which each node is judged, [row, node, bin].

        Predicted at the node's parent, for the token in the node's own place.
        """
        num_bins = len(self.action_tokens)
        return self.action_log_probs.gather(1, self.parents[:, :, None].expand(-1, -1, num_bins))

    @cached_property
    def whole_entropy(self) -> Tensor:
        """Entropy of the expected token over every token scored, [row, node].

        As a share of the largest that the model's whole vocabulary allows, so that it means the
        same where only action rows are scored: what is left out has next to no odds.
        """
        log_probs = self.scores.logits.log_softmax(dim=2)
        largest = math.log(self.num_tokens or len(self.vocabulary))
        here = -(log_probs.exp() * log_probs).nansum(dim=2) / largest
        return here.gather(1, self.parents)

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the expected token's distribution, 0..1, [row, node].

        h = -sum p log p / log |action tokens|, taken where the node's token was predicted.
        """
        log_probs = self.action_log_probs
        here = -(log_probs.exp() * log_probs).nansum(dim=2) / math.log(len(self.action_tokens))
        return here.gather(1, self.parents)

    def drafted_log_probs(self) -> Tensor:
        """The target's log-probability of each drafted token, -inf off the action range."""
        num_bins = len(self.action_tokens)
        bins = (self.tree.tokens - self.action_tokens.first).clamp(0, num_bins - 1)
        found = self.action_log_probs.flatten(1).gather(1, self.parents * num_bins + bins)
        return found.masked_fill(~self.action_tokens.contains(self.tree.tokens), -math.inf)


class AcceptanceRule(ABC):
    """Says which paths of a scored tree may be committed. Rules are immutable and share nothing."""

    radius_field: ClassVar[str] = ""  # the field that holds a number of bins
    reads_numbers: ClassVar[bool] = False  # whether it judges numbers that are written as text

    @property
    def is_exact(self) -> bool:
        """Whether every accepted token equals the target's own."""
        return False

    @property
    def needs_patches(self) -> bool:
        """Whether the rule reads hidden states of the image patches, which cost extra work."""
        return False

    @property
    def needs_space(self) -> bool:
        """Whether it measures distances between action tokens, and so makes no sense without."""
        return True

    @property
    def drift_leak(self) -> float:
        """The share of a session's drift that stays after each step."""
        return 1.0

    @abstractmethod
    def accepts(self, scored: ScoredTree) -> Tensor:
        """True where the whole path from the root to the node may be committed, [row, node]."""

    def with_radius(self, radius: int) -> AcceptanceRule:
        """With another radius in bins: `radius_field` is replaced; `RequestError` if it is ""."""
        if not self.radius_field:
            name = type(self).__name__
            raise RequestError("radius", f"{name} has no radius in bins, got {radius}")
        return replace(self, **{self.radius_field: radius})  # type: ignore[type-var]


@dataclass(frozen=True)
class ExactMatch(AcceptanceRule):
    """d = t: with any drafts the output equals greedy decoding.

    d is the drafted token and t the target's own. With sampled predictions instead of greedy ones
    the output has exactly the target's distribution: see `predict`.
    """

    is_exact = True
    needs_space = False  # tokens are equal or not, whatever they mean

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Equal all the way."""
        return scored.whole_paths(scored.is_equal)

    def with_radius(self, radius: int) -> AcceptanceRule:
        """Only radius 0 is exact."""
        if radius == 0:
            return self
        raise RequestError(
            "radius",
            f"exact decoding has no radius, got {radius}; pick a relaxed method such as "
            "'deft' or 'spec-vla', or leave radius out",
        )
