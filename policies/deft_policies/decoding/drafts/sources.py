"""What draft sources are given and return, and how their guesses become one tree.

Two kinds. A guesser names whole actions, position by position; it needs no pass of any model, so
its guesses can ride in the prefill. A grower reads the target's hidden states, so it starts after
the prefill and grows a tree. Neither knows which rule will judge its guesses.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from deft_policies.decoding.history import ActionHistory, HistoryTensors
from deft_policies.decoding.plan import MOST_GROWN, PLAIN, DraftKind, Plan, TreeShape
from deft_policies.decoding.records import BatchProgress
from deft_policies.decoding.target import PromptFeatures, Prompts
from deft_policies.decoding.tree import DraftTree


@dataclass(frozen=True)
class Guesses:
    """Guessed actions of every row, aligned with positions. A guess stops at the first unknown."""

    tokens: Tensor  # [row, chain, position] int64
    is_known: Tensor  # [row, chain, position] bool


class Guesser(Protocol):
    """Names whole actions without running a model.

    One that says `may_be_recorded` reads nothing but tensors: what it does between passes can be
    replayed without it.
    """

    @property
    def kind(self) -> DraftKind:
        """Its name."""

    @property
    def steps_needed(self) -> int:
        """How many past steps of the session it reads."""

    @property
    def guesses_once(self) -> bool:
        """True if what it says before the prefill stays its answer for the whole action."""

    def can_guess(self, prompts: Prompts, histories: Sequence[ActionHistory]) -> bool:
        """False when there is nothing to guess from in any row."""

    def guess(self, prompts: Prompts, history: HistoryTensors, progress: BatchProgress) -> Guesses:
        """Say what the action may be, given what is committed of it."""


class Grower(Protocol):
    """Grows trees from what the target computed. `begin`, then `grow` after every pass.

    One that says `may_be_recorded` lets its `grow` be replayed without it: it reads nothing but
    tensors, and keeps what changes from pass to pass in tensors that stay where they are.
    """

    @property
    def kind(self) -> DraftKind:
        """Its name."""

    @property
    def needs_hidden(self) -> bool:
        """Whether `begin` reads the prompt's hidden states."""

    @property
    def steps_needed(self) -> int:
        """How many past steps of the session it reads."""

    def begin(self, seen: "Seen", features: PromptFeatures) -> None:
        """Start a batch of actions, after the prefill."""

    def grow(self, progress: BatchProgress, shape: TreeShape) -> DraftTree:
        """Take in `progress.last`, then guess what follows the roots.

        No deeper than `progress.depth`, unless the shape is of full depth.
        """

    def warm_up(self, shape: TreeShape, length: int) -> None:
        """Run every step that trees of this shape can need, for actions of `length` tokens."""


def tree_of_guesses(
    guesses: Sequence[Guesses], kinds: Sequence[DraftKind], progress: BatchProgress
) -> DraftTree:
    """Merge guessed actions into a prefix tree below the roots.

    `kinds` names the source of each of `guesses`. Chains that start alike share nodes: the first
    of them keeps the node and the others' copies become padding, so the shape depends on nothing
    but the number of chains and the depth.
    """
    tokens = torch.cat([one.tokens for one in guesses], dim=1)
    known = torch.cat([one.is_known for one in guesses], dim=1)
    tokens, known = _from_here(tokens, known, progress)
    num_rows, num_chains, depth = tokens.shape
    # Filled on the device: a list would have to be copied there, which makes the host wait.
    sources = torch.cat(
        [
            tokens.new_full((one.tokens.shape[1] * depth,), kind.number)
            for kind, one in zip(kinds, guesses, strict=True)
        ]
    )
    if num_chains == 1:
        parents, is_real = torch.arange(depth, device=tokens.device), known
        parents = parents.expand(num_rows, -1)
    else:
        parents, is_real = _share_prefixes(tokens, known)
    return DraftTree(
        tokens=tokens.flatten(1),
        parents=parents,
        is_real=is_real.flatten(1),
        log_probs=torch.zeros_like(parents, dtype=torch.float32),
        sources=sources.expand_as(parents),
        is_chain=num_chains == 1,
    ).below(progress.roots)


def _from_here(tokens: Tensor, known: Tensor, progress: BatchProgress) -> tuple[Tensor, Tensor]:
    """Cut chains to the positions that are still open: [row, chain, level]."""
    depth = progress.depth
    if tokens.shape[0] == 1:  # the host knows where the only row stands
        here = slice(progress.fewest, progress.fewest + depth)
        tokens, known = tokens[:, :, here], known[:, :, here]
    else:
        levels = torch.arange(depth, device=tokens.device)
        places = progress.num_committed[:, None] + levels
        is_open = (places < progress.length - 1)[:, None, :]
        index = places.clamp(max=progress.length - 1)[:, None, :].expand(-1, tokens.shape[1], -1)
        tokens, known = tokens.gather(2, index), known.gather(2, index) & is_open
    return tokens, known.cummin(dim=2).values


def _share_prefixes(tokens: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Parents [row, guess] and reality [row, chain, level] of chains merged into a prefix tree."""
    num_rows, num_chains, depth = tokens.shape
    both = known.unsqueeze(2) & known.unsqueeze(1)
    alike = (tokens.unsqueeze(2) == tokens.unsqueeze(1)) & both
    alike = alike.cummin(dim=3).values  # [row, chain, other, level]: equal up to this level
    first = alike.int().argmax(dim=2)  # the first chain with this prefix, [row, chain, level]
    chains = torch.arange(num_chains, device=tokens.device)[:, None]
    levels = torch.arange(depth, device=tokens.device)
    is_real = known & (first == chains)
    above = 1 + first[:, :, :-1] * depth + levels[:-1]
    parents = torch.cat((torch.zeros_like(first[:, :, :1]), above), dim=2).flatten(1)
    return torch.where(is_real.flatten(1), parents, 0), is_real


def trimmed(tree: DraftTree) -> DraftTree:
    """Drop nodes that are padding in every row. Looks at the tensor."""
    kept = tree.is_real.any(dim=0)
    if bool(kept.all()):
        return tree
    return tree.select(kept.nonzero().flatten())


def cut(tree: DraftTree, widest: int) -> DraftTree:
    """Drop what a target has no room for: the last nodes, on which no earlier one hangs."""
    if tree.num_nodes <= widest:
        return tree
    return tree.select(torch.arange(widest, device=tree.tokens.device))


@dataclass(frozen=True)
class Sources:
    """Every draft source that was built for a target."""

    guessers: tuple[Guesser, ...]
    growers: tuple[Grower, ...]

    @property
    def kinds(self) -> frozenset[DraftKind]:
        """The sources there are."""
        return frozenset([one.kind for one in self.guessers] + [one.kind for one in self.growers])

    def usable(self, plans: Sequence[Plan]) -> tuple[Plan, ...]:
        """Those of the plans whose sources are all there, in order; plain decoding if none."""
        return tuple(plan for plan in plans if plan.kinds <= self.kinds) or (PLAIN,)

    def guessers_of(self, kinds: Sequence[DraftKind]) -> list[Guesser]:
        """The guessers among `kinds`, in that order."""
        found = {one.kind: one for one in self.guessers}
        return [found[kind] for kind in kinds if kind in found]

    def growers_of(self, kinds: Sequence[DraftKind]) -> list[Grower]:
        """The growers among `kinds`, in that order."""
        found = {one.kind: one for one in self.growers}
        return [found[kind] for kind in kinds if kind in found]

    def steps_needed(self, plan: Plan) -> int:
        """Past steps the plan's sources read."""
        used: tuple[Guesser | Grower, ...] = (*self.guessers, *self.growers)
        return max((one.steps_needed for one in used if one.kind in plan.kinds), default=0)

    def needs_hidden(self, plan: Plan) -> bool:
        """Whether any of the plan's sources reads the prompt's hidden states."""
        return any(one.needs_hidden for one in self.growers_of(plan.rounds))


@dataclass(frozen=True)
class Seen:
    """What a batch starts from, and how wide a tree its target can take."""

    prompts: Prompts
    sessions: Sequence[ActionHistory]
    history: HistoryTensors
    widest_tree: int
    trims: bool = False  # drop padding: where looking costs nothing and no shape is captured


@dataclass(frozen=True)
class BatchDrafts:
    """Where the guesses of one batch come from, by one plan.

    Guessers are those that can guess; `known` is what some of them say for the whole action.
    """

    shape: TreeShape
    riders: tuple[Guesser, ...]
    guessers: tuple[Guesser, ...]
    growers: tuple[Grower, ...]
    seen: Seen
    known: Mapping[DraftKind, Guesses]

    @staticmethod
    def of(sources: Sources, plan: Plan, seen: Seen, progress: BatchProgress) -> "BatchDrafts":
        """Ask who can guess, and those who guess once."""

        def able(kinds: Sequence[DraftKind]) -> tuple[Guesser, ...]:
            found = sources.guessers_of(kinds)
            return tuple(one for one in found if one.can_guess(seen.prompts, seen.sessions))

        riders, guessers = able(plan.prefill), able(plan.rounds)
        once = {one.kind: one for one in (*riders, *guessers) if one.guesses_once}
        known = {
            kind: one.guess(seen.prompts, seen.history, progress) for kind, one in once.items()
        }
        growers = tuple(sources.growers_of(plan.rounds))
        return BatchDrafts(plan.shape, riders, guessers, growers, seen, known)

    def before_prefill(self, progress: BatchProgress) -> DraftTree:
        """The chains that ride behind the prompt."""
        return self._guess(self.riders, progress)

    def begin(self, features: PromptFeatures) -> None:
        """Hand the growers what the prefill computed of the prompt; only if passes follow."""
        for grower in self.growers:
            grower.begin(self.seen, features)

    def between_passes(self, progress: BatchProgress) -> DraftTree:
        """Guesses for the next pass; `progress.last` is the one that just ended."""
        shape, _ = self.at(progress.depth)
        grown = [grower.grow(progress, self.shape) for grower in self.growers if shape is not None]
        guessed = self._guess(self.guessers, progress)
        trees = [*grown, guessed] if guessed.num_nodes > 1 or not grown else grown
        return cut(DraftTree.side_by_side(trees), self.seen.widest_tree)

    def at(self, depth: int) -> tuple[TreeShape | None, int]:
        """What of the next tree depends on how many levels are of use: what grows, and chains."""
        grows = bool(self.growers) and (depth > 0 or self.shape.is_full_depth)
        return self.shape.cut(depth) if grows else None, depth if self.guessers else 0

    @property
    def recipe(self) -> Hashable:
        """What does not."""
        return self.shape, self.guessers, self.growers

    @property
    def given(self) -> "GivenDrafts":
        """What differs from batch to batch of what rounds read."""
        known = tuple(self.known[one.kind] for one in self.guessers if one.kind in self.known)
        asked = [one for one in self.guessers if one.kind not in self.known]
        reads_history = any(one.steps_needed > 0 for one in asked)
        return GivenDrafts(self.seen.history if reads_history else None, known)

    @property
    def may_be_recorded(self) -> bool:
        """Whether all of them say that they may be."""
        sources = (*self.guessers, *self.growers)
        fits = self.shape.num_grown <= MOST_GROWN
        return fits and all(getattr(one, "may_be_recorded", False) for one in sources)

    def over(self, given: "GivenDrafts") -> "BatchDrafts":
        """The same where that lies elsewhere."""
        kinds = [one.kind for one in self.guessers if one.kind in self.known]
        known = dict(zip(kinds, given.known, strict=True))
        seen = replace(self.seen, history=given.history) if given.history else self.seen
        return replace(self, seen=seen, known=known)

    def _guess(self, guessers: Sequence[Guesser], progress: BatchProgress) -> DraftTree:
        seen = self.seen
        if not guessers or progress.depth == 0:
            return DraftTree.root_only(progress.roots)
        guesses = [
            self.known[one.kind]
            if one.kind in self.known
            else one.guess(seen.prompts, seen.history, progress)
            for one in guessers
        ]
        tree = tree_of_guesses(guesses, [one.kind for one in guessers], progress)
        return cut(trimmed(tree) if seen.trims else tree, seen.widest_tree)


@dataclass(frozen=True)
class GivenDrafts:
    """Tensors that guesses of later rounds come from."""

    history: HistoryTensors | None  # where any guesser still reads it
    known: tuple[Guesses, ...]
