"""Turning guessed chains into one prefix tree, and several trees into one. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deft_policies.decoding.drafts.source import (
    Grower,
    Guesser,
    Guesses,
    Progress,
)
from deft_policies.decoding.history import ActionHistory, HistoryTensors
from deft_policies.decoding.plan import PLAIN, DraftKind, Plan
from deft_policies.decoding.presets import Preset
from deft_policies.decoding.target import PromptFeatures, Prompts
from deft_policies.decoding.tree import DraftTree


def tree_of_guesses(
    guesses: Sequence[Guesses], kinds: Sequence[DraftKind], progress: Progress
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
    parts = [
        tokens.new_full((one.tokens.shape[1] * depth,), kind.number)
        for kind, one in zip(kinds, guesses, strict=True)
    ]
    sources = torch.cat(parts)
    if num_chains == 1:
        nodes = torch.arange(-1, depth, device=tokens.device)
        parents, is_real = nodes.expand(num_rows, -1), known.flatten(1)
    else:
        parents, is_real = _share_prefixes(tokens, known)
    tree = _below_roots(progress.roots, tokens.flatten(1), parents, is_real, sources)
    return replace(tree, is_chain=num_chains == 1)


def _from_here(tokens: Tensor, known: Tensor, progress: Progress) -> tuple[Tensor, Tensor]:
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
    """Parents [row, node] and reality [row, node - 1] of chains merged into a prefix tree."""
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
    parents = torch.where(is_real.flatten(1), parents, 0)
    root = torch.full_like(parents[:, :1], -1)
    return torch.cat((root, parents), dim=1), is_real.flatten(1)


def _below_roots(
    roots: Tensor, tokens: Tensor, parents: Tensor, is_real: Tensor, sources: Tensor
) -> DraftTree:
    root = roots[:, None]
    every = torch.cat((root, tokens), dim=1)
    sources = torch.cat((sources.new_full((1,), -1), sources)).expand_as(every)
    return DraftTree(
        tokens=every,
        parents=parents,
        is_real=torch.cat((torch.ones_like(root, dtype=torch.bool), is_real), dim=1),
        log_probs=torch.zeros_like(every, dtype=torch.float32),
        sources=sources,
    )


def join(trees: Sequence[DraftTree]) -> DraftTree:
    """Put trees of the same roots side by side. Equal guesses of two trees stay two nodes."""
    if len(trees) == 1:
        return trees[0]
    parents, offset = [trees[0].parents], trees[0].num_nodes - 1
    for tree in trees[1:]:
        below = tree.parents[:, 1:]
        parents.append(torch.where(below > 0, below + offset, below))
        offset += tree.num_nodes - 1
    rest = trees[1:]
    return DraftTree(
        tokens=torch.cat([trees[0].tokens, *(tree.tokens[:, 1:] for tree in rest)], dim=1),
        parents=torch.cat(parents, dim=1),
        is_real=torch.cat([trees[0].is_real, *(tree.is_real[:, 1:] for tree in rest)], dim=1),
        log_probs=torch.cat([trees[0].log_probs, *(tree.log_probs[:, 1:] for tree in rest)], dim=1),
        sources=torch.cat([trees[0].sources, *(tree.sources[:, 1:] for tree in rest)], dim=1),
    )


def trimmed(tree: DraftTree) -> DraftTree:
    """Drop nodes that are padding in every row, where looking costs nothing (on a CPU).

    Elsewhere shapes stay fixed and a wider pass is as fast.
    """
    if tree.tokens.device.type != "cpu":
        return tree
    kept = tree.is_real.any(dim=0)
    if bool(kept.all()):
        return tree
    index = kept.nonzero().flatten()
    renumber = torch.cumsum(kept, dim=0) - 1
    above = tree.parents[:, index]
    return DraftTree(
        tokens=tree.tokens[:, index],
        parents=torch.where(above < 0, above, renumber[above.clamp(min=0)].clamp(min=0)),
        is_real=tree.is_real[:, index],
        log_probs=tree.log_probs[:, index],
        sources=tree.sources[:, index],
        is_chain=tree.is_chain,  # a chain's padding is its end
    )


def cut(tree: DraftTree, widest: int) -> DraftTree:
    """Drop what a target has no room for: the last nodes, on which no earlier one hangs."""
    if tree.num_nodes <= widest:
        return tree
    return DraftTree(
        tokens=tree.tokens[:, :widest],
        parents=tree.parents[:, :widest],
        is_real=tree.is_real[:, :widest],
        log_probs=tree.log_probs[:, :widest],
        sources=tree.sources[:, :widest],
        is_chain=tree.is_chain,
    )


@dataclass(frozen=True)
class Sources:
    """Every draft source that was built for a target."""

    guessers: tuple[Guesser, ...]
    growers: tuple[Grower, ...]

    @property
    def kinds(self) -> frozenset[DraftKind]:
        """The sources there are."""
        return frozenset([one.kind for one in self.guessers] + [one.kind for one in self.growers])

    def usable(self, preset: Preset) -> tuple[Plan, ...]:
        """The preset's plans whose sources are all there, in order; plain decoding if none."""
        return tuple(plan for plan in preset.plans if plan.kinds <= self.kinds) or (PLAIN,)

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
        used = self.guessers_of(tuple(plan.kinds))
        return max((one.steps_needed for one in used), default=0)

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


class PlannedDrafting:
    """The guesses of one batch, by one plan."""

    def __init__(self, sources: Sources, plan: Plan, seen: Seen) -> None:
        self._plan = plan
        self._seen = seen
        self._riders = sources.guessers_of(plan.prefill)
        self._guessers = sources.guessers_of(plan.rounds)
        self._growers = sources.growers_of(plan.rounds)
        self._fixed: dict[DraftKind, Guesses] = {}

    def before_prefill(self, progress: Progress) -> DraftTree:
        """The chains that ride behind the prompt."""
        return self._guess(self._riders, progress)

    def begin(self, features: PromptFeatures) -> None:
        """Hand the prompt to the growers."""
        for grower in self._growers:
            grower.begin(self._seen.prompts, features)

    def between_passes(self, progress: Progress) -> DraftTree:
        """One tree of everything the plan drafts between passes."""
        shape = self._plan.shape
        grown = [
            grower.grow(progress, shape)
            for grower in self._growers
            if progress.depth > 0 or shape.is_fixed
        ]
        guessed = self._guess(self._guessers, progress)
        trees = [*grown, guessed] if guessed.num_nodes > 1 or not grown else grown
        return cut(join(trees), self._seen.widest_tree)

    def _guess(self, guessers: Sequence[Guesser], progress: Progress) -> DraftTree:
        seen = self._seen
        able = [one for one in guessers if one.can_guess(seen.prompts, seen.sessions)]
        if not able or progress.depth == 0:
            return DraftTree.root_only(progress.roots)
        guesses = [self._ask(one, progress) for one in able]
        tree = tree_of_guesses(guesses, [one.kind for one in able], progress)
        return cut(trimmed(tree), self._seen.widest_tree)

    def _ask(self, guesser: Guesser, progress: Progress) -> Guesses:
        seen = self._seen
        if not guesser.is_fixed:
            return guesser.guess(seen.prompts, seen.history, progress)
        if guesser.kind not in self._fixed:
            self._fixed[guesser.kind] = guesser.guess(seen.prompts, seen.history, progress)
        return self._fixed[guesser.kind]
