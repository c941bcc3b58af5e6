"""How draft trees are shaped, by numbers alone. Imports nothing heavy: flags are made of it."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from importlib.metadata import entry_points
from math import prod

MOST_LEVELS, MOST_BRANCHES, MOST_GUESSES = 16, 32, 256  # of trees that are asked for
MOST_GROWN = 128  # nodes that rounds which are recorded look behind
DRAFT_SOURCES = "deft.draft_sources"  # the entry points under which packages bring sources


class DraftKind(str):
    """The name of a draft source: one of ours, or one that an installed package brings."""

    HEAD = "head"  # the trained EAGLE-style draft head
    PREVIOUS = "previous"  # the target's own last action
    EXTRAPOLATION = "extrapolation"  # the last actions, continued in a straight line
    NGRAM = "ngram"  # what followed the same tokens earlier in the session
    RETRIEVAL = "retrieval"  # the action stored with the most similar frame
    RECYCLED = "recycled"  # the target's answers behind its last mismatch (Jacobi)
    MEDUSA = "medusa"  # parallel heads, one per position ahead
    SMALL_MODEL = "small-model"  # a cheaper model of the same actions
    TOKEN_RECYCLING = "token-recycling"  # what the target last said after the same tokens
    PREVIOUS_ANSWER = "previous-answer"  # the last answer, text and all, as it lines up


OUR_KINDS = (
    DraftKind.HEAD,
    DraftKind.PREVIOUS,
    DraftKind.EXTRAPOLATION,
    DraftKind.NGRAM,
    DraftKind.RETRIEVAL,
    DraftKind.RECYCLED,
    DraftKind.MEDUSA,
    DraftKind.SMALL_MODEL,
    DraftKind.TOKEN_RECYCLING,
)


@lru_cache(maxsize=1)
def source_kinds() -> tuple[str, ...]:
    """Every source there can be: ours, then those of installed packages in order of name."""
    theirs = sorted({one.name for one in entry_points(group=DRAFT_SOURCES)})
    return tuple(dict.fromkeys((*OUR_KINDS, DraftKind.PREVIOUS_ANSWER, *theirs)))


def source_number(kind: str) -> int:
    """What `DraftTree.sources` holds for this source."""
    return source_kinds().index(kind)


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
            above, level = level, []
            for path in above:
                for rank in range(reach // prod(step + 1 for step in path)):
                    level.append((*path, rank))
                    _check_size(len(paths) + len(level))
            paths += level
        return TreeTemplate(tuple(paths))

    @staticmethod
    def branches(num: int, levels: int) -> "TreeTemplate":
        """Chains beside each other, which part at the root (LVSpec's tree has two)."""
        _check_size(num * levels)
        firsts = [(rank, *(0,) * depth) for depth in range(levels) for rank in range(num)]
        return TreeTemplate(tuple(firsts))

    @staticmethod
    def eagle() -> "TreeTemplate":
        """The 25 guesses of EAGLE-1's static tree, with which SpecVLM drafts."""
        num_children = {
            (): 4,
            (0,): 3,
            (1,): 2,
            (2,): 2,
            (3,): 1,
            (0, 0): 3,
            (0, 1): 2,
            (0, 2): 2,
            (1, 0): 1,
            (0, 0, 0): 3,
            (0, 0, 0, 0): 2,
        }
        paths = ((*path, rank) for path, num in num_children.items() for rank in range(num))
        return TreeTemplate(tuple(sorted(paths, key=_by_level)))

    @property
    def levels(self) -> int:
        """Length of the longest path."""
        return len(self.paths[-1])

    @property
    def num_inner(self) -> int:
        """Nodes that others hang on, the root among them."""
        return len({path[:-1] for path in self.paths})

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

    def as_template(self) -> TreeTemplate:
        """Its template; of a shape without one, a chain of its levels."""
        return self.template or TreeTemplate.harmonic(self.levels, 1)

    def grown_through(self, num_nodes: int) -> "TreeShape":
        """The shape, less what a grower cannot look behind with room for so many nodes."""
        if self.template is None:
            return replace(self, top_k=min(self.top_k, max(num_nodes // self.levels, 1)))
        template = self.template
        while template.num_inner > num_nodes:
            template = template.cut(template.levels - 1)
        return replace(self, levels=template.levels, template=template)

    @property
    def num_grown(self) -> int:
        """Nodes that a grower looks behind, at most."""
        if self.template is None:
            return self.levels * self.top_k
        return self.template.num_inner


@dataclass(frozen=True)
class Plan:
    """What rides in the prefill, if it can, and what drafts between later passes."""

    name: str
    prefill: tuple[str, ...] = ()
    rounds: tuple[str, ...] = ()
    shape: TreeShape = TreeShape()

    @property
    def kinds(self) -> frozenset[str]:
        """Every source it uses."""
        return frozenset(self.prefill + self.rounds)


PLAIN = Plan("plain")


class Loop(Enum):
    """When an action ends, and what counts until then."""

    LEAN = "lean"  # the last token is the bonus of a pass, and is never drafted for
    PUBLISHED = "published"  # Spec-VLA's: a draft of the last token counts, a pass commits it

    @property
    def num_behind(self) -> int:
        """Tokens decoded behind an action: the published loop ends when it has seen one."""
        return 1 if self is Loop.PUBLISHED else 0


class TieBreak(Enum):
    """Which of several longest accepted paths wins."""

    CLOSEST = "closest"  # smallest total distance in bins, then the likelier draft, then the first
    FIRST_ROW = "first-row"  # the path of the first leaf, in node order, below it (EAGLE, Spec-VLA)


# Trees by name, and how large each of their numbers may be.
_TREES: dict[str, tuple[Callable[..., TreeShape | TreeTemplate], tuple[int, ...]]] = {
    "dynamic": (TreeShape, (MOST_LEVELS, MOST_BRANCHES, MOST_GUESSES)),
    "template": (TreeTemplate.harmonic, (MOST_LEVELS, MOST_LEVELS)),
    "branches": (TreeTemplate.branches, (MOST_LEVELS, MOST_LEVELS)),
    "chain": (TreeShape.chain, (MOST_LEVELS,)),
}


def read_tree(text: str) -> TreeShape:
    """dynamic:LEVELS,TOP_K,GUESSES, template:LEVELS,REACH, branches:NUM,LEVELS or chain:LEVELS.

    `eagle` is EAGLE-1's tree. A + may stand for colon and comma, which have meanings of their own
    in the text of a method.
    """
    if text == "eagle":
        return TreeShape.of_template(TreeTemplate.eagle())
    kind, *parts = re.split(r"[:,+]", text)
    grow, most = _TREES.get(kind, (TreeShape, ()))
    sizes = [int(part) for part in parts if part.isdigit() and int(part) > 0]
    if len(sizes) != len(parts) or len(sizes) != len(most) or not sizes:
        raise ValueError(
            "expected dynamic:LEVELS,TOP_K,GUESSES, template:LEVELS,REACH, branches:NUM,LEVELS, "
            f"chain:LEVELS with numbers of at least 1, or eagle, got {text!r}"
        )
    if any(size > limit for size, limit in zip(sizes, most, strict=True)):
        raise ValueError(f"{kind} takes numbers up to {', '.join(map(str, most))}, got {text!r}")
    shape = grow(*sizes)
    return shape if isinstance(shape, TreeShape) else TreeShape.of_template(shape)


def read_kinds(text: str) -> tuple[str, ...]:
    """Draft sources by name, joined by + or commas, each once."""
    known = source_kinds()
    names = [name.strip() for name in re.split(r"[,+]", text)]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown source {unknown[0]!r}; known: {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def _check_size(num_paths: int) -> None:
    """Refuse a tree while it is counted: callers write these numbers."""
    if num_paths > MOST_GUESSES:
        raise ValueError(f"a tree may have at most {MOST_GUESSES} paths, and this one has more")


def _by_level(path: Path) -> tuple[int, Path]:
    return len(path), path
