"""Rules that ask how sure the target is of a token, and how much of it depends on the image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deft_policies.decoding.acceptance.rule import AcceptanceRule, ScoredTree

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TopK(AcceptanceRule):
    """d is among the k likeliest action tokens of the target (SpecDec, Xia et al. 2022)."""

    k: int = 5

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

    n: int = 10
    delta: float = 0.6

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

    low: int = 1
    high: int = 15
    full: float = 0.5

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
    def needs_space(self) -> bool:
        """Only a cap is a distance."""
        return self.cap is not None

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Every miss on the path gated, and its window on the path clean."""
        gated = scored.relaxable(self.text)
        if self.gate:
            gated = gated & (scored.whole_entropy >= self.theta)
        if self.cap is not None:
            gated = gated & _within(scored, self.cap, self.text)
        missed = ~scored.is_equal & (scored.tree.parents >= 0)
        return scored.whole_paths(~missed | gated) & self._windows_clean(scored, missed)

    def _windows_clean(self, scored: ScoredTree, missed: Tensor) -> Tensor:
        """True where every miss on the node's path has its window on that path, without a miss."""
        depths = scored.tree.depths()
        ancestors = scored.tree.ancestor_mask()
        window_end = depths + self.window
        if self.clip:
            window_end = window_end.minimum(scored.deepest.unsqueeze(1))
        too_short = window_end.unsqueeze(1) > depths.unsqueeze(2)  # [row, node, miss]
        # later[row, miss, node]: node lies inside the miss's window and is itself a miss.
        later = (depths.unsqueeze(1) > depths.unsqueeze(2)) & missed.unsqueeze(1)
        later &= depths.unsqueeze(1) <= window_end.unsqueeze(2)
        dirty = (ancestors.float() @ (later.float().transpose(1, 2))) > 0
        # dirty counts misses on the node's path inside the window of any candidate `miss`; only
        # candidates that are on the path and are misses themselves matter.
        relevant = ancestors & missed.unsqueeze(1)
        return ~(relevant & (too_short | dirty)).any(dim=2)


@dataclass(frozen=True)
class VisualRelevance(AcceptanceRule):
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
                shifted = shifted & _within(scored, self.shift_cap, self.text)[:, None]
            fine = fine | shifted
        if self.cap is not None:
            fine = fine & _within(scored, self.cap, self.text)[:, None]
        fine = fine & scored.relaxable(self.text)[:, None]
        missed = branches & ~(scored.is_equal[:, None] | fine)
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
        from torch.nn import functional

        if scored.context.patches is None:
            raise ValueError("LVSpec needs the hidden states of the image patches")
        nodes = functional.normalize(scored.scores.hidden.float(), dim=2)
        patches = functional.normalize(scored.context.patches.float(), dim=2)
        cosines = nodes @ patches.transpose(1, 2)
        return cosines.topk(min(self.num_patches, cosines.shape[2]), dim=2).values.mean(dim=2)


def _at_least_one(name: str, count: int) -> None:
    if count < 1:
        raise ValueError(f"{name} must be 1 or more, got {count}")


def _within(scored: ScoredTree, cap: int, words: bool) -> Tensor:
    """True where |d - t| <= cap, [row, node]; words have no distance, and none is too far."""
    near = scored.deviations.abs() <= cap
    return near | scored.is_word if words else near


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
