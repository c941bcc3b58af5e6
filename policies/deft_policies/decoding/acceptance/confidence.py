"""Rules that ask how sure the target is of a token, and how much of it depends on the image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deft_policies.decoding.acceptance.rule import (
    AcceptanceRule,
    DeviceRule,
    JudgedTree,
    ScoredNodes,
    TreeRule,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TopK(DeviceRule):
    """d is among the k likeliest action tokens of the target (SpecDec, Xia et al. 2022)."""

    k: int = 5

    def __post_init__(self) -> None:
        _at_least_one("k", self.k)

    needs_space = False  # it knows odds, and no distances

    def accepts(self, scored: ScoredNodes) -> Tensor:
        """Likely enough by rank."""
        return scored.drafted_log_probs >= _kth_largest(scored, self.k)


@dataclass(frozen=True)
class NearTop(DeviceRule):
    """d is among the n likeliest and p(d) >= max p - delta (TensorRT-LLM's relaxed acceptance)."""

    n: int = 10
    delta: float = 0.6

    def __post_init__(self) -> None:
        _at_least_one("n", self.n)

    needs_space = False  # it knows odds, and no distances

    def accepts(self, scored: ScoredNodes) -> Tensor:
        """Nearly as likely as the target's own token."""
        drafted, best = scored.drafted_log_probs, scored.action_log_probs.amax(dim=1)
        near = drafted.exp() >= best.exp() - self.delta
        return near & (drafted >= _kth_largest(scored, self.n))


@dataclass(frozen=True)
class EntropyRadius(DeviceRule):
    """|d - t| <= low + (high - low) min(1, h / full), h the target's normalised entropy (ours).

    The radius grows with the target's own uncertainty: where it is sure, the draft must be nearly
    right; where many bins are as good as each other, a wider miss means nothing.
    """

    low: int = 1
    high: int = 15
    full: float = 0.5

    def __post_init__(self) -> None:
        if self.full <= 0:
            raise ValueError(f"full must be above 0, got {self.full}")

    def accepts(self, scored: ScoredNodes) -> Tensor:
        """Near enough for the target's certainty."""
        share = (scored.entropy / self.full).clamp(max=1.0)
        radius = self.low + (self.high - self.low) * share
        return (scored.drafted - scored.expected).abs() <= radius

    def with_radius(self, radius: int) -> AcceptanceRule:
        """Replace the largest radius."""
        return replace(self, high=radius, low=min(self.low, radius))


@dataclass(frozen=True)
class DeferredWindow(TreeRule):
    """A miss at depth j stands if h_j >= theta and the next min(W, left) drafts match (FLy).

    h is the target's entropy over its whole vocabulary, as a share of the largest there can be.
    Without the gate every miss is deferred; with a window of 0 the gate alone decides (FLy-).

    FLy waits W tokens to see whether the target corrects itself, and rejects a miss whose window
    runs off the draft: j + W > K. An action has seven tokens, so the window ends where the action
    does; `clip=False` is the paper to the letter. `cap`, if given, also bounds |d - t| of action
    tokens; FLy has no such bound. With `text`, words of a text are relaxed, too.
    """

    theta: float = 0.3
    window: int = 6
    cap: int | None = None
    gate: bool = True
    clip: bool = True
    text: bool = False

    radius_field = "cap"

    @property
    def words(self) -> bool:
        """As `text` says."""
        return self.text

    @property
    def needs_space(self) -> bool:
        """Only a cap is a distance."""
        return self.cap is not None

    def measure(self, scored: ScoredNodes) -> Tensor | None:
        """h, where there is a gate."""
        return scored.whole_entropy if self.gate else None

    def accepts(self, judged: JudgedTree) -> list[bool]:
        """Every miss on the path gated, and its window on the path clean."""
        tree, num_nodes = judged.tree, judged.tree.num_nodes
        missed = [not equal for equal in judged.is_equal]
        fine = [
            not missed[node] or (judged.is_relaxable[node] and self._is_gated(judged, node))
            for node in range(num_nodes)
        ]
        stands = judged.whole_paths(fine)
        for node in range(tree.root + 1, num_nodes):
            if stands[node]:
                stands[node] = self._has_clean_windows(judged, missed, node)
        return stands

    def _is_gated(self, judged: JudgedTree, node: int) -> bool:
        if self.gate and judged.measured[node] < self.theta:
            return False
        return self.cap is None or judged.is_word[node] or _distance(judged, node) <= self.cap

    def _has_clean_windows(self, judged: JudgedTree, missed: list[bool], node: int) -> bool:
        """Whether every miss on the node's path has its window on that path, without a miss."""
        path = judged.tree.path_to(node)[judged.tree.root + 1 :]
        misses = [depth for depth, one in enumerate(path, start=1) if missed[one]]
        for miss in misses:
            end = miss + self.window
            if self.clip:
                end = min(end, judged.deepest)
            if end > len(path) or any(miss < other <= end for other in misses):
                return False
        return True


@dataclass(frozen=True)
class VisualRelevance(TreeRule):
    """d = t, or d is among the share of least visual drafts, or t is drafted nearby (LVSpec).

    A_i = mean of the N largest cos(h_i, v) over the image patches v, with h_i and v the target's
    last hidden states (eq. 8). Of the K drafts of a branch, from the root to a leaf, the
    floor(lambda K) with the smallest A_i are loose (eq. 9-10). With `shift_tolerant`, a miss also
    stands when the target's own token is drafted anywhere on the branch (eq. 11), and |d - t| is at
    most `shift_cap`: an action's tokens are different dimensions, so that the same token drafted
    four dimensions later excuses nothing. Every branch is judged for itself, and a path stands if
    it does in any. `cap`, if given, bounds |d - t| of every miss. The caps bound action tokens
    alone. With neither cap this is the paper to the letter, and a loose token may be any action
    token at all. With `text`, words of a text are relaxed, too.
    """

    num_patches: int = 10
    share: float = 0.7
    shift_tolerant: bool = True
    cap: int | None = None
    shift_cap: int | None = None
    text: bool = False

    radius_field = "cap"
    needs_patches = True  # the cosines are taken with them

    def __post_init__(self) -> None:
        _at_least_one("num_patches", self.num_patches)

    @property
    def words(self) -> bool:
        """As `text` says."""
        return self.text

    @property
    def needs_space(self) -> bool:
        """Only the caps are distances."""
        return self.cap is not None or self.shift_cap is not None

    def measure(self, scored: ScoredNodes) -> Tensor:
        """A_i of every node."""
        from torch.nn import functional

        if scored.patches is None:
            raise ValueError("LVSpec needs the hidden states of the image patches")
        nodes = functional.normalize(scored.hidden.float(), dim=1)
        patches = functional.normalize(scored.patches.float(), dim=1)
        cosines = nodes @ patches.t()
        return cosines.topk(min(self.num_patches, len(patches)), dim=1).values.mean(dim=1)

    def accepts(self, judged: JudgedTree) -> list[bool]:
        """Equal, loose or merely shifted all the way in one branch."""
        tree = judged.tree
        stands = [True] * (tree.root + 1) + [False] * (tree.num_nodes - tree.root - 1)
        for branch in judged.branches():
            by_relevance = sorted(branch, key=lambda node: (judged.measured[node], node))
            loose = set(by_relevance[: int(len(branch) * self.share + 1e-6)])
            drafted = {tree.tokens[node] for node in branch}
            for node in branch:
                is_shifted = self.shift_tolerant and judged.expected[node] in drafted
                if not self._is_fine(judged, node, node in loose, is_shifted):
                    break
                stands[node] = True
        return stands

    def _is_fine(self, judged: JudgedTree, node: int, is_loose: bool, is_shifted: bool) -> bool:
        if judged.is_equal[node]:
            return True
        far = 0 if judged.is_word[node] else _distance(judged, node)
        is_shifted = is_shifted and (self.shift_cap is None or far <= self.shift_cap)
        is_near = self.cap is None or far <= self.cap
        return judged.is_relaxable[node] and (is_loose or is_shifted) and is_near


def _at_least_one(name: str, count: int) -> None:
    if count < 1:
        raise ValueError(f"{name} must be 1 or more, got {count}")


def _distance(judged: JudgedTree, node: int) -> int:
    return abs(judged.tree.tokens[node] - judged.expected[node])


def _kth_largest(scored: ScoredNodes, k: int) -> Tensor:
    """The k-th largest log-probability where each node's token was predicted, [node]."""
    log_probs = scored.action_log_probs
    return log_probs.topk(min(k, log_probs.shape[1]), dim=1).values[:, -1]
