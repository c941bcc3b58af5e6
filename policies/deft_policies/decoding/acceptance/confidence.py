"""Rules that ask how sure the target is of a token, and how much of it depends on the image."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.decoding.acceptance.rule import AcceptanceRule, ScoredTree


@dataclass(frozen=True)
class TopK(AcceptanceRule):
    """d is among the k likeliest action tokens of the target (SpecDec, Xia et al. 2022)."""

    k: int

    def __post_init__(self) -> None:
        _at_least_one("k", self.k)

    needs_space = False  # it knows odds, and no distances

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Likely enough by rank all the way."""
        ranked = scored.drafted_log_probs() >= _kth_largest(scored, self.k)
        return scored.relaxed_paths(ranked)


@dataclass(frozen=True)
class NearTop(AcceptanceRule):
    """d is among the n likeliest and p(d) >= max p - delta (TensorRT-LLM's relaxed acceptance)."""

    n: int
    delta: float

    def __post_init__(self) -> None:
        _at_least_one("n", self.n)

    needs_space = False  # it knows odds, and no distances

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Nearly as likely as the target's own token all the way."""
        drafted = scored.drafted_log_probs()
        best = scored.action_log_probs.amax(dim=2).gather(1, scored.parents)
        near = drafted.exp() >= best.exp() - self.delta
        ranked = drafted >= _kth_largest(scored, self.n)
        return scored.relaxed_paths(near & ranked)


@dataclass(frozen=True)
class EntropyRadius(AcceptanceRule):
    """|d - t| <= low + (high - low) min(1, h / full), h the target's normalised entropy (ours).

    The radius grows with the target's own uncertainty: where it is sure, the draft must be nearly
    right; where many bins are as good as each other, a wider miss means nothing.
    """

    low: int
    high: int
    full: float

    def __post_init__(self) -> None:
        if self.full <= 0:
            raise ValueError(f"full must be above 0, got {self.full}")

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Near enough for the target's certainty all the way."""
        share = (scored.entropy / self.full).clamp(max=1.0)
        radius = self.low + (self.high - self.low) * share
        return scored.relaxed_paths(scored.deviations.abs() <= radius)

    def with_radius(self, radius: int) -> AcceptanceRule:
        """Replace the largest radius."""
        return replace(self, high=radius, low=min(self.low, radius))


@dataclass(frozen=True)
class DeferredWindow(AcceptanceRule):
    """A miss at depth j stands if h_j >= theta and the next min(W, left) drafts match (FLy).

    h is the target's entropy over its whole vocabulary, as a share of the largest there can be.
    Without the gate every miss is deferred; with a window of 0 the gate alone decides (FLy-).

    FLy waits W tokens to see whether the target corrects itself, and rejects a miss whose window
    runs off the draft. An action has seven tokens, so the window is clipped to what is left of it:
    only a draft that stops short of the action's end makes a miss fail for want of evidence.
    `cap`, if given, also bounds |d - t|; FLy has no such bound.
    """

    theta: float
    window: int
    cap: int | None = None
    gate: bool = True

    @property
    def needs_space(self) -> bool:
        """Only a cap is a distance."""
        return self.cap is not None

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Every miss on the path gated, and its window on the path clean."""
        gated = scored.is_relaxable
        if self.gate:
            gated = gated & (scored.whole_entropy >= self.theta)
        if self.cap is not None:
            gated = gated & (scored.deviations.abs() <= self.cap)
        missed = ~scored.is_equal & (scored.tree.parents >= 0)
        return scored.whole_paths(~missed | gated) & self._windows_clean(scored, missed)

    def _windows_clean(self, scored: ScoredTree, missed: Tensor) -> Tensor:
        """True where every miss on the node's path has its window on that path, without a miss."""
        depths = scored.tree.depths()
        ancestors = scored.tree.ancestor_mask()
        deepest = scored.deepest
        window_end = torch.minimum(depths + self.window, deepest.unsqueeze(1))
        too_short = window_end.unsqueeze(1) > depths.unsqueeze(2)  # [row, node, miss]
        # later[row, miss, node]: node lies inside the miss's window and is itself a miss.
        later = (depths.unsqueeze(1) > depths.unsqueeze(2)) & missed.unsqueeze(1)
        later &= depths.unsqueeze(1) <= window_end.unsqueeze(2)
        dirty = (ancestors.float() @ (later.float().transpose(1, 2))) > 0
        # dirty counts misses on the node's path inside the window of any candidate `miss`; only
        # candidates that are on the path and are misses themselves matter.
        relevant = ancestors & missed.unsqueeze(1)
        return ~(relevant & (too_short | dirty)).any(dim=2)

    def with_radius(self, radius: int) -> AcceptanceRule:
        """Bound the distance of a miss."""
        return replace(self, cap=radius)


@dataclass(frozen=True)
class VisualRelevance(AcceptanceRule):
    """d = t, or d is among the share of least visual drafts, or t is drafted nearby (LVSpec).

    A_i = mean of the N largest cos(h_i, v) over the image patches v, with h_i and v the target's
    last hidden states (eq. 8). Of the K drafts of a branch, from the root to a leaf, the
    floor(lambda K) with the smallest A_i are loose (eq. 9-10). With `shift_tolerant`, a miss also
    stands when the target's own token is drafted anywhere on the branch (eq. 11), and |d - t| is at
    most `shift_cap`: an action's tokens are different dimensions, so that the same token drafted
    four dimensions later excuses nothing. Every branch is judged for itself, and a path stands if
    it does in any. `cap`, if given, bounds |d - t| of every miss. With neither cap this is the
    paper to the letter, and a loose token may be any action token at all.
    """

    num_patches: int
    share: float
    shift_tolerant: bool
    cap: int | None = None
    shift_cap: int | None = None

    def __post_init__(self) -> None:
        _at_least_one("num_patches", self.num_patches)

    @property
    def needs_space(self) -> bool:
        """Only the caps are distances."""
        return self.cap is not None or self.shift_cap is not None

    needs_patches = True  # the cosines are taken with them

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Equal, loose or merely shifted all the way in one branch."""
        branches = _branches(scored)
        fine = self._is_loose(scored, branches)
        if self.shift_tolerant:
            shifted = _is_shifted(scored, branches)
            if self.shift_cap is not None:
                shifted = shifted & (scored.deviations.abs() <= self.shift_cap)[:, None]
            fine = fine | shifted
        if self.cap is not None:
            fine = fine & (scored.deviations.abs() <= self.cap)[:, None]
        missed = branches & ~(scored.is_equal[:, None] | (fine & scored.is_relaxable[:, None]))
        above = scored.tree.ancestor_mask().float().transpose(1, 2)
        stands = branches & (missed.float() @ above == 0)
        return stands.any(dim=1) | (scored.tree.parents < 0)

    def _is_loose(self, scored: ScoredTree, branches: Tensor) -> Tensor:
        """True for the least visual share of each branch, [row, leaf, node]."""
        relevance = self.relevance(scored)
        mine, others = relevance.unsqueeze(2), relevance.unsqueeze(1)
        is_tie_before = (mine == others).tril(diagonal=-1)
        rank = branches.float() @ ((others < mine) | is_tie_before).float().transpose(1, 2)
        num_loose = (branches.sum(dim=2, keepdim=True) * self.share + 1e-6).floor()
        return branches & (rank < num_loose)

    def relevance(self, scored: ScoredTree) -> Tensor:
        """A_i of every node, [row, node]."""
        if scored.context.patches is None:
            raise ValueError("LVSpec needs the hidden states of the image patches")
        nodes = functional.normalize(scored.scores.hidden.float(), dim=2)
        patches = functional.normalize(scored.context.patches.float(), dim=2)
        cosines = nodes @ patches.transpose(1, 2)
        return cosines.topk(min(self.num_patches, cosines.shape[2]), dim=2).values.mean(dim=2)

    def with_radius(self, radius: int) -> AcceptanceRule:
        """Bound the distance of a miss."""
        return replace(self, cap=radius)


def _at_least_one(name: str, count: int) -> None:
    if count < 1:
        raise ValueError(f"{name} must be 1 or more, got {count}")


def _kth_largest(scored: ScoredTree, k: int) -> Tensor:
    """The k-th largest log-probability where each node's token was predicted, [row, node]."""
    log_probs = scored.action_log_probs
    kth = log_probs.topk(min(k, log_probs.shape[2]), dim=2).values[:, :, -1]
    return kth.gather(1, scored.parents)


def _branches(scored: ScoredTree) -> Tensor:
    """True for the guesses on the way from the root to a leaf, [row, leaf, node]."""
    is_guess = scored.tree.is_real & (scored.tree.parents >= 0)
    ways = scored.tree.ancestor_mask() & is_guess.unsqueeze(1) & is_guess.unsqueeze(2)
    is_leaf = ways.sum(dim=1) == 1  # on no way but its own
    return ways & is_leaf.unsqueeze(2)


def _is_shifted(scored: ScoredTree, branches: Tensor) -> Tensor:
    """True where the expected token is drafted on the branch, [row, leaf, node]."""
    same = scored.expected.unsqueeze(2) == scored.tree.tokens.unsqueeze(1)
    return branches & (branches.float() @ same.float().transpose(1, 2) > 0)
