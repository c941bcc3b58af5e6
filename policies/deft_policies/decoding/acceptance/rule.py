"""Acceptance rules: what each kind of rule is asked, and the exact one.

A draft is accepted if it is the target's own token, or if the rule says so. Rules are immutable and
share nothing. Local, path and tree rules accept by numbers of the host; device rules,
`TreeRule.measure`, `ChoosingRule.choose` and `observe_prompt` see tensors. Imports no torch, so
that methods are listed and checked without it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from deft_policies.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from deft_policies.decoding.sequence import AnswerSpec, Sequence
    from deft_policies.decoding.target import Prompt
    from deft_policies.decoding.tree import DraftTree
    from deft_policies.model.sizes import TokenRange

# A guess on a path: the drafted token, the target's own, and the place: which token of its action,
# from 0. (A position is a token's in the whole sequence, a slot an answer's in the cache.)
Guess = tuple[int, int, int]


class DimensionGroup(IntEnum):
    """Places that share a unit and a limit."""

    MOVE = 0  # unit: millimetres per step
    TURN = 1  # unit: degrees per step
    GRIP = 2  # judged by its class where the space names a boundary


@dataclass(frozen=True)
class ActionSpace:
    """One action, token by token. All tuples are [place].

    `unit_per_bin` is how far the robot moves when a token moves by one bin, 0.0 where that is
    unknown or nothing. Tokens at or above `class_boundary` belong to one class and tokens below it
    to the other; None where a place has no classes.
    Where places are numbers written as text, 0 to `largest_number`, a bin is a number.
    """

    groups: tuple[DimensionGroup, ...]
    unit_per_bin: tuple[float, ...]
    class_boundary: tuple[int | None, ...]
    largest_number: int = 0  # 0: places are tokens

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

    @staticmethod
    def in_bins(length: int) -> ActionSpace:
        """A space whose units are unknown: every limit is then a number of bins."""
        return ActionSpace((DimensionGroup.MOVE,) * length, (0.0,) * length, (None,) * length)


class AcceptanceRule:
    """What all kinds of rules say of themselves. Derive from one of the five kinds below."""

    radius_field: ClassVar[str] = ""  # the field that holds a number of bins
    reads_prompts: ClassVar[bool] = False  # whether it reads prompts' hidden states; costs work

    @property
    def is_exact(self) -> bool:
        """Whether every accepted token equals the target's own. Then `accepts` is not heeded."""
        return False

    @property
    def needs_space(self) -> bool:
        """Whether it measures distances between action tokens, and so makes no sense without."""
        return True

    @property
    def tokens_behind(self) -> int:
        """Tokens that are decoded behind an action, and thrown away."""
        return 0

    @property
    def drift_leak(self) -> float:
        """The share of a session's drift that stays after each step."""
        return 1.0

    def with_radius(self, radius: int) -> AcceptanceRule:
        """With another radius in bins: `radius_field` is replaced; `RequestError` if it is ""."""
        if not self.radius_field:
            name = type(self).__name__
            raise RequestError("radius", f"{name} has no radius in bins, got {radius}")
        return replace(self, **{self.radius_field: radius})  # type: ignore[type-var]

    def problem(self, spec: AnswerSpec) -> str:
        """Why it cannot judge answers like these, as said behind a method's name; "" if it can."""
        if self.needs_space and (spec.space is None or spec.numbers_in_row):
            return (
                "measures distances between action tokens, and this model's answers have none; "
                "exact, entropy, top-k and near-top rules apply"
            )
        return ""

    def may_relax(self, drafted: int, expected: int, sequence: Sequence) -> bool:
        """Whether it is asked about two tokens: usually where both are bins of an action.

        Every other draft must be the target's own token.
        """
        has_distance = sequence.spec.space is not None
        return has_distance and sequence.is_bin(drafted) and sequence.is_bin(expected)

    def observe_prompt(self, sequence: Sequence, prompt: Prompt, hidden: Tensor) -> None:
        """Look at the hidden states [position, width] of a prompt, where it `reads_prompts`.

        What it keeps belongs into `sequence.notes`; the hidden states are overwritten later.
        """

    def best_path(self, judged: JudgedTree, accepted: list[bool]) -> list[int]:
        """The path to commit, from node 0 on, of those to accepted nodes.

        The longest that the answer has room for; of equally long ones the nearest to the target's
        own tokens, then the likelier draft, then the first.
        """
        longest = judged.longest(judged.within_answer(accepted))
        best = min(longest, key=lambda node: judged.distance_to(node, accepted))
        return judged.tree.path_to(best)


class LocalRule(AcceptanceRule, ABC):
    """Judges a guess by itself."""

    @abstractmethod
    def accepts(self, drafted: int, expected: int, place: int) -> bool:
        """Whether a drafted token is accepted for the expected one at this place of the action.

        Asked where they differ and `may_relax` holds. Places count from 0.
        """


class PathRule(AcceptanceRule, ABC):
    """Judges a guess by the path to it, and by what is known of the answer."""

    @abstractmethod
    def accepts(self, path: Items[Guess], sequence: Sequence) -> bool:
        """Whether the last guess of a path is accepted, where all before it are.

        Asked where its tokens differ and `may_relax` holds. The sequence must not be changed.
        """


class TreeRule(AcceptanceRule, ABC):
    """Looks ahead: judges every node with the whole tree in view."""

    def measure(self, scored: ScoredNodes) -> Tensor | None:
        """Numbers of the device [node] that it judges by, `JudgedTree.measured`; None: none."""
        return None

    @abstractmethod
    def accepts(self, judged: JudgedTree) -> list[bool]:
        """Whether the path from the root to a node may be committed, [node]. The root may.

        The answer is taken as it is: the rule itself heeds `is_relaxable` and the nodes above.
        """


class DeviceRule(AcceptanceRule, ABC):
    """Judges all nodes by what the target computed for them, before the host reads anything."""

    @abstractmethod
    def accepts(self, scored: ScoredNodes) -> Tensor:
        """Whether a guess is accepted for the expected token, bool [node].

        What is said of nodes whose tokens are equal, or may not be relaxed, is not looked at.
        """


@dataclass(frozen=True)
class ExactMatch(LocalRule):
    """d = t: with any drafts the output equals greedy decoding.

    d is the drafted token and t the target's own. With sampled predictions instead of greedy ones
    the output has exactly the target's distribution.
    """

    is_exact = True
    needs_space = False  # tokens are equal or not, whatever they mean

    def accepts(self, drafted: int, expected: int, place: int) -> bool:
        """Never, where they differ."""
        return False

    def with_radius(self, radius: int) -> AcceptanceRule:
        """Only radius 0 is exact."""
        if radius == 0:
            return self
        raise RequestError(
            "radius",
            f"exact decoding has no radius, got {radius}; pick a relaxed method such as "
            "'deft' or 'spec-vla', or leave radius out",
        )


class ChoosingRule(AcceptanceRule, ABC):
    """Chooses path and bonus itself, on the device, among drafts drawn at random by known odds.

    Tokens must keep the target's distribution. Drafts that were not drawn are judged exactly.
    """

    @property
    def is_exact(self) -> bool:
        """In distribution."""
        return True

    @property
    def needs_space(self) -> bool:
        """It knows odds, and no distances."""
        return False

    @abstractmethod
    def choose(self, sequence: Sequence, tree: DraftTree, logits: Tensor) -> Tensor:
        """The last node to commit and the bonus, [2], from logits [node, token]; no value read."""


def at_least_one(name: str, count: int) -> None:
    """Refuse a field of a rule that counts something and is 0."""
    if count < 1:
        raise ValueError(f"{name} must be 1 or more, got {count}")


@dataclass
class JudgedTree:
    """A draft tree with what the target said of it, as a `TreeRule` sees it. Lists are [node]."""

    tree: DraftTree
    expected: list[int]  # the target's token in the node's own place; of the root: -1
    predictions: list[int]  # the target's token after each node
    is_equal: list[bool]
    is_relaxable: list[bool]  # what `may_relax` says
    depths: list[int]  # below the root; -1 for committed nodes before it
    deepest: int  # the depth of the last guess that may count
    measured: list[float]  # by `TreeRule.measure` or `DeviceRule.accepts`; empty where by neither
    sequence: Sequence

    def whole_paths(self, fine: list[bool]) -> list[bool]:
        """Whether a node and all nodes above it up to the root are fine."""
        tree = self.tree
        accepted = [True] * (tree.root + 1)
        for node in range(tree.root + 1, tree.num_nodes):
            accepted.append(accepted[tree.parents[node]] and fine[node])
        return accepted

    def within_answer(self, accepted: list[bool]) -> list[bool]:
        """Those that are accepted and within what is missing, with no stop token on their path."""
        tree, spec = self.tree, self.sequence.spec
        fine = [depth <= self.deepest for depth in self.depths]
        if spec.stop is not None:
            no_stop = self.whole_paths([not spec.ends_with(token) for token in tree.tokens])
            fine = [is_fine and other for is_fine, other in zip(fine, no_stop, strict=True)]
        return [
            node <= tree.root or (is_accepted and fine[node])
            for node, is_accepted in enumerate(accepted)
        ]

    def longest(self, may_end: list[bool]) -> list[int]:
        """Of nodes where a path may end, those of the longest paths, in order."""
        length = max(self.depths[node] for node, may in enumerate(may_end) if may)
        return [node for node, may in enumerate(may_end) if may and self.depths[node] == length]

    def distance(self, node: int) -> int:
        """How far a guess is from the target's own token."""
        return abs(self.tree.tokens[node] - self.expected[node])

    def distance_to(self, node: int, accepted: list[bool]) -> tuple[int, float, int]:
        """Orders equally long paths: total distance of accepted guesses, how unlikely, the node."""
        tree = self.tree
        path = tree.path_to(node)[tree.root + 1 :]
        distance = sum(self.distance(above) for above in path if accepted[above])
        known = tree.log_probs[node] if node < len(tree.log_probs) else 0.0
        return distance, -known, node

    def branches(self) -> list[list[int]]:
        """The guesses on the way from the root to each leaf."""
        tree = self.tree
        inner = set(tree.parents)
        leaves = [node for node in range(tree.root + 1, tree.num_nodes) if node not in inner]
        return [tree.path_to(leaf)[tree.root + 1 :] for leaf in leaves]


@dataclass(frozen=True)
class ScoredNodes:
    """Nodes of one or several trees with what the target computed, as device rules see them.

    The drafted token of a node is judged against the prediction made at its parent. A root is its
    own parent.
    """

    drafted: Tensor  # [node] int64
    expected: Tensor  # [node] int64
    parents: Tensor  # [node] int64, indices into these nodes
    logits: Tensor  # [node, token] float32, after each node
    hidden: Tensor  # [node, width], after the final norm
    action_tokens: TokenRange
    notes: Mapping[str, Any] = field(default_factory=dict)  # of the answer: `Sequence.notes`

    @cached_property
    def action_log_probs(self) -> Tensor:
        """The target's log-probabilities over action tokens alone, where a node was predicted.

        [node, bin]. Conditioned on an action token, so that a threshold means the same whatever
        else the vocabulary holds.
        """
        bins = self.logits[:, self.action_tokens.first : self.action_tokens.last + 1]
        return bins.log_softmax(dim=1)[self.parents]

    @cached_property
    def drafted_log_probs(self) -> Tensor:
        """The target's log-probability of each drafted token, -inf off the action range. [node]."""
        num_bins = len(self.action_tokens)
        bins = (self.drafted - self.action_tokens.first).clamp(0, num_bins - 1)
        log_probs = self.action_log_probs.gather(1, bins[:, None]).squeeze(1)
        return log_probs.masked_fill(~self.action_tokens.contains(self.drafted), -math.inf)

    def kth_largest(self, k: int) -> Tensor:
        """The k-th largest log-probability of an action token where each node was predicted."""
        log_probs = self.action_log_probs
        return log_probs.topk(min(k, log_probs.shape[1]), dim=1).values[:, -1]

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the expected token over action tokens, as a share of the largest. [node]."""
        return _entropy(self.action_log_probs, len(self.action_tokens))

    @cached_property
    def whole_entropy(self) -> Tensor:
        """Entropy of the expected token over the vocabulary, as a share of the largest. [node]."""
        log_probs = self.logits.log_softmax(dim=1)[self.parents]
        return _entropy(log_probs, self.logits.shape[1])


def _entropy(log_probs: Tensor, num_tokens: int) -> Tensor:
    return -(log_probs.exp() * log_probs).nansum(dim=1) / math.log(num_tokens)
