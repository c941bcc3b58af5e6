"""Carrying a plan out: asking its sources for guesses at the right moments."""

from collections.abc import Sequence
from dataclasses import dataclass

from deft_policies.decoding.drafts.merge import cut, join, tree_of_guesses, trimmed
from deft_policies.decoding.drafts.source import Grower, Guesser, Guesses, Progress
from deft_policies.decoding.history import ActionHistory, HistoryTensors
from deft_policies.decoding.kinds import DraftKind
from deft_policies.decoding.plan import PLAIN, Plan
from deft_policies.decoding.presets import Preset
from deft_policies.decoding.target import PromptFeatures, Prompts
from deft_policies.decoding.tree import DraftTree


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
