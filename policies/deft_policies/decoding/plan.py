"""How draft trees are shaped, by numbers alone. Imports nothing heavy: flags are made of it."""

from dataclasses import dataclass, replace
from enum import Enum
from math import prod


class DraftKind(Enum):
    """The draft sources there are."""

    HEAD = "head"  # the trained EAGLE-style draft head
    PREVIOUS = "previous"  # the target's own last action
    EXTRAPOLATION = "extrapolation"  # the last actions, continued in a straight line
    NGRAM = "ngram"  # what followed the same tokens earlier in the session
    RETRIEVAL = "retrieval"  # the action stored with the most similar frame
    RECYCLED = "recycled"  # the target's answers behind its last mismatch (Jacobi)
    MEDUSA = "medusa"  # parallel heads, one per position ahead
    SMALL_MODEL = "small-model"  # a cheaper model of the same tokens

    @property
    def number(self) -> int:
        """What `DraftTree.sources` holds for this kind."""
        return SOURCE_KINDS.index(self)


SOURCE_KINDS: tuple[DraftKind, ...] = tuple(DraftKind)


class RopeOffset(Enum):
    """Where a draft head places the nodes of its tree, from level 2 on."""

    CORRECT = "correct"  # behind the committed positions, patches counted
    PUBLISHED = "published"  # Spec-VLA's code: 0 in the first round, then without the patches


class KeyMask(Enum):
    """Which keys an action position of a draft head may attend to."""

    CAUSAL = "causal"  # everything before it and itself
    PREFIX_ONLY = "prefix-only"  # the prompt without its last position, as Spec-VLA was trained


Path = tuple[int, ...]


@dataclass(frozen=True)
class TreeTemplate:
    """A tree that is the same whatever the drafts are, so that its steps can be captured.

    A node is named by its path: at every step, the rank of its token among its siblings by
    likelihood, 0 the likeliest. Nodes are numbered level by level, the root being node 0.
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        if not self.paths or self.paths != tuple(sorted(set(self.paths), key=_by_level)):
            raise ValueError("a template needs paths, each once, level by level and in order")
        known = {(), *self.paths}
        orphan = next((path for path in self.paths if path[:-1] not in known), None)
        if orphan is not None or () in self.paths or min(map(min, self.paths)) < 0:
            raise ValueError(f"every path of a template continues another one, got {orphan}")

    @staticmethod
    def harmonic(levels: int, reach: int) -> "TreeTemplate":
        """Every path whose ranks, counted from 1, multiply to at most `reach`.

        Wide at the top and along likely paths, narrow elsewhere: a token of rank k is taken to be
        right about 1 / k as often as the likeliest.
        """
        paths: list[Path] = []
        level: list[Path] = [()]
        for _ in range(levels):
            level = [
                (*path, rank)
                for path in level
                for rank in range(reach)
                if prod(step + 1 for step in path) * (rank + 1) <= reach
            ]
            paths += level
        return TreeTemplate(tuple(sorted(paths, key=_by_level)))

    @property
    def levels(self) -> int:
        """Length of the longest path."""
        return len(self.paths[-1])

    def cut(self, levels: int) -> "TreeTemplate":
        """Its first levels, at least one."""
        if levels >= self.levels:
            return self
        return TreeTemplate(tuple(path for path in self.paths if len(path) <= max(levels, 1)))

    def level(self, depth: int) -> tuple[Path, ...]:
        """The paths of one length, in order."""
        return tuple(path for path in self.paths if len(path) == depth)

    def inner(self, depth: int) -> tuple[Path, ...]:
        """Those of a level that other paths continue."""
        continued = {path[:-1] for path in self.level(depth + 1)}
        return tuple(path for path in self.level(depth) if path in continued)


@dataclass(frozen=True)
class TreeShape:
    """How a grower grows: `levels` sequential steps, `top_k` branches, the best `num_guesses` kept.

    With a `template`, its paths are grown instead. A tree never goes deeper than what is missing of
    the action, unless `is_full_depth`: then it has all levels in every round, as Spec-VLA's has,
    and what is too deep is never accepted.
    """

    levels: int = 5
    top_k: int = 8
    num_guesses: int = 49
    is_full_depth: bool = False
    template: TreeTemplate | None = None

    @staticmethod
    def chain(levels: int) -> "TreeShape":
        """One branch."""
        return TreeShape(levels, 1, levels)

    @staticmethod
    def of_template(template: TreeTemplate) -> "TreeShape":
        """The same paths in every round, as deep as is of use."""
        widest = 1 + max(path[-1] for path in template.paths)
        return TreeShape(template.levels, widest, len(template.paths), template=template)

    def cut(self, depth: int) -> "TreeShape":
        """The shape where `depth` levels are of use."""
        if self.is_full_depth or depth >= self.levels:
            return self
        template = None if self.template is None else self.template.cut(depth)
        return replace(self, levels=depth, template=template)

    @property
    def num_grown(self) -> int:
        """Nodes that a grower looks behind, at most."""
        if self.template is None:
            return self.levels * self.top_k
        return len({path[:-1] for path in self.template.paths})


@dataclass(frozen=True)
class Plan:
    """What rides in the prefill (at most three kinds), and what drafts between later passes."""

    name: str
    prefill: tuple[DraftKind, ...] = ()
    rounds: tuple[DraftKind, ...] = ()
    shape: TreeShape = TreeShape()

    @property
    def kinds(self) -> frozenset[DraftKind]:
        """Every source it uses."""
        return frozenset(self.prefill + self.rounds)


PLAIN = Plan("plain")


def _by_level(path: Path) -> tuple[int, Path]:
    return len(path), path
