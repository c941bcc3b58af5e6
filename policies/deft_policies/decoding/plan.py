"""Plans: which sources draft when, and trees of which shape. Imports nothing heavy."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from math import prod

from deft_policies.decoding.kinds import BLOCK, HEAD, MEDUSA, SMALL_MODEL, meaning

# Sources whose guesses have the tree's form.
_GROWING = frozenset((HEAD, BLOCK, MEDUSA, SMALL_MODEL))
MOST_LEVELS, MOST_BRANCHES, MOST_GUESSES = 16, 32, 256  # of trees that callers ask for
MOST_GROWN = 128  # nodes with children in a tree that a small model grows


class RopeOffset(Enum):
    """Where a draft head places the nodes of its tree, from level 2 on."""

    CORRECT = "correct"  # after the committed positions, patches counted
    PUBLISHED = "published"  # Spec-VLA's code: 0 in the first round, then without the patches


class KeyMask(Enum):
    """Which keys an action position of a draft head may attend to."""

    CAUSAL = "causal"  # everything before it and itself
    PREFIX_ONLY = "prefix-only"  # the prompt without its last position, as Spec-VLA was trained


Path = tuple[int, ...]


def _check_size(num_paths: int) -> None:
    """Refuse a tree while it is counted: callers write these numbers."""
    if num_paths > MOST_GUESSES:
        raise ValueError(f"a tree may have at most {MOST_GUESSES} paths, and this one has more")


@dataclass(frozen=True)
class TreeShape:
    """How a tree grows: `levels` steps, `top_k` branches, the `num_guesses` likeliest stay.

    A tree with `paths` is a template: it is the same whatever the drafts are, so that its steps can
    be captured. A path names a node: at every step, the rank of its token among its siblings by
    likelihood, 0 the likeliest. Paths are listed level by level and in order.

    A tree never goes deeper than what is missing of the action, unless `is_full_depth`: then it has
    all levels in every round, as Spec-VLA's has, and what is too deep is never accepted.
    """

    levels: int = 5
    top_k: int = 8
    num_guesses: int = 49
    is_full_depth: bool = False
    paths: tuple[Path, ...] = ()

    @staticmethod
    def chain(levels: int) -> "TreeShape":
        """A chain: one branch."""
        return TreeShape(levels, 1, levels)

    @staticmethod
    def of_paths(paths: tuple[Path, ...]) -> "TreeShape":
        """The same paths in every round, as deep as is of use."""
        if not paths or paths != tuple(sorted(set(paths), key=lambda path: (len(path), path))):
            raise ValueError("a template needs paths, each once, level by level and in order")
        prefixes = {(), *paths}
        orphan = next((path for path in paths if path[:-1] not in prefixes), None)
        if orphan is not None or () in paths or min(map(min, paths)) < 0:
            raise ValueError(f"every path of a template continues another one, got {orphan}")
        widest = 1 + max(path[-1] for path in paths)
        return TreeShape(len(paths[-1]), widest, len(paths), paths=paths)

    @staticmethod
    def template(levels: int, reach: int) -> "TreeShape":
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
        return TreeShape.of_paths(tuple(paths))

    @staticmethod
    def branches(num: int, levels: int) -> "TreeShape":
        """Chains side by side, which part at the root (LVSpec's tree has two)."""
        _check_size(num * levels)
        firsts = [(rank, *(0,) * depth) for depth in range(levels) for rank in range(num)]
        return TreeShape.of_paths(tuple(firsts))

    @staticmethod
    def eagle() -> "TreeShape":
        """The 25 guesses of EAGLE-1's static tree, with which SpecVLM drafts."""
        paths = (
            "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 "
            "0000 0001 0002 00000 00001"
        )
        return TreeShape.of_paths(tuple(tuple(map(int, path)) for path in paths.split()))

    def cut(self, depth: int) -> "TreeShape":
        """The shape where `depth` levels are of use; of a template at least one level stays."""
        if depth >= self.levels:
            return self
        paths = tuple(path for path in self.paths if len(path) <= max(depth, 1))
        return replace(self, levels=depth, paths=paths)

    def as_template(self) -> "TreeShape":
        """Itself if it is a template, else a chain of its levels."""
        return self if self.paths else TreeShape.template(self.levels, 1)

    def with_most_open(self, num_nodes: int) -> "TreeShape":
        """The shape, cut so that at most `num_nodes` nodes get children."""
        if not self.paths:
            return replace(self, top_k=min(self.top_k, max(num_nodes // self.levels, 1)))
        shape = self
        while shape.num_open > num_nodes:
            shape = shape.cut(shape.levels - 1)
        return shape

    @property
    def meaning(self) -> str:
        """Its form, in words."""
        if self.top_k == 1:
            return f"a chain of up to {self.levels}"
        return f"a tree of up to {self.num_guesses}, {self.levels} deep"

    @property
    def num_open(self) -> int:
        """Nodes that get children at most, the root of a template among them."""
        if not self.paths:
            return self.levels * self.top_k
        return len({path[:-1] for path in self.paths})

    def level(self, depth: int) -> tuple[Path, ...]:
        """The paths of one length, in order."""
        return tuple(path for path in self.paths if len(path) == depth)

    def inner(self, depth: int) -> tuple[Path, ...]:
        """Those of a level that other paths continue."""
        continued = {path[:-1] for path in self.level(depth + 1)}
        return tuple(path for path in self.level(depth) if path in continued)


@dataclass(frozen=True)
class Plan:
    """Which sources draft in the prefill, if they can, and which before later passes."""

    name: str
    prefill: tuple[str, ...] = ()
    rounds: tuple[str, ...] = ()
    shape: TreeShape = TreeShape()

    @property
    def kinds(self) -> frozenset[str]:
        """Every source it uses."""
        return frozenset(self.prefill + self.rounds)

    @property
    def meaning(self) -> str:
        """What drafts when, in words."""
        if not self.kinds:
            return "no drafts: a pass for every token"
        before, later = (
            " and ".join(map(meaning, sources)) for sources in (self.prefill, self.rounds)
        )
        if not {*self.rounds}.isdisjoint(_GROWING):
            later += f" ({self.shape.meaning})"
        if before == later:
            return f"every pass: {later}"
        return f"prefill: {before or 'nothing'}; later passes: {later or 'nothing'}"


PLAIN = Plan("plain")


def plan(name: str, prefill: str, rounds: str, shape: TreeShape | None = None) -> Plan:
    """Sources are joined by +; none is the empty text."""
    before, later = (tuple(text.split("+")) if text else () for text in (prefill, rounds))
    return Plan(name, before, later, shape or TreeShape())


_MEMORY = plan("memory", "previous", "previous")
# Of actions. A guard chooses among them; without one it is the first whose sources are loaded.
ACTION_PLANS = (
    plan("memory+tree", "previous", "head"),
    plan("memory+branches", "previous", "head", TreeShape(3, 2, 8)),
    plan("memory+chain", "previous", "head", TreeShape.chain(5)),
    _MEMORY,
    plan("memory-once", "previous", ""),  # in the prefill, where a guess costs next to nothing
    plan("memory+recycled", "previous", "previous+recycled"),
    plan("head-chain", "", "head", TreeShape.chain(5)),
)
# Of relaxed methods whose answers must not depend on what is loaded: one plan, without a head.
STEADY_PLANS = (plan("memory+recycled", "previous", "previous+recycled"),)
# A method with one of these has TEXT_PLANS for texts, and NUMBER_PLANS for numbers as text.
DEFAULT_PLANS = (ACTION_PLANS, STEADY_PLANS)
TEXT_PLANS = (plan("previous-answer", "previous-answer", "previous-answer"),)
NUMBER_PLANS = (plan("previous-numbers", "previous-numbers", "previous-numbers"),)
# By the name that the knob `plans=` takes. Method files add their own.
PLANS = {
    "none": (PLAIN,),
    "ours": ACTION_PLANS,
    "steady": STEADY_PLANS,
}

# Trees by name, and how large each of their numbers may be.
_TREES: dict[str, tuple[Callable[..., TreeShape], tuple[int, ...]]] = {
    "dynamic": (TreeShape, (MOST_LEVELS, MOST_BRANCHES, MOST_GUESSES)),
    "template": (TreeShape.template, (MOST_LEVELS, MOST_LEVELS)),
    "branches": (TreeShape.branches, (MOST_LEVELS, MOST_LEVELS)),
    "chain": (TreeShape.chain, (MOST_LEVELS,)),
}


def read_tree(text: str) -> TreeShape:
    """dynamic:LEVELS,TOP_K,GUESSES, template:LEVELS,REACH, branches:NUM,LEVELS or chain:LEVELS.

    `eagle` is EAGLE-1's tree. A + may be written for colon and comma, which have meanings of their
    own in the text of a method.
    """
    if text == "eagle":
        return TreeShape.eagle()
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
    return grow(*sizes)
