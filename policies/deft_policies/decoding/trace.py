"""Records of passes, converted to traces lazily."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deft_core.types import CountedPasses, PassTrace
from deft_policies.decoding.clock import Span, Stage, milliseconds
from deft_policies.decoding.tree import DraftTree

Name = Callable[[Sequence[int]], tuple[int, ...]]


@dataclass(eq=False)
class PassRecord:
    """One pass of one answer, in numbers of the host; times may still be events of a device."""

    is_prefill: bool
    tree: DraftTree
    predictions: list[int]  # the target's token after each node
    path: list[int]  # nodes kept, from node 0 on
    bonus: int
    spans: list[Span]

    def ms(self, *stages: Stage) -> float:
        """Time spent in these stages."""
        return sum(milliseconds(*marks) for stage, *marks in self.spans if stage in stages)

    @property
    def accepted(self) -> int:
        """Guesses kept."""
        return len(self.path) - 1 - self.tree.root

    def describe(self, name: Name) -> PassTrace:
        """As a trace: node 0 is the root, and tokens are called by their `name`."""
        tree, root = self.tree, self.tree.root
        return PassTrace(
            is_prefill=self.is_prefill,
            tokens=name(tree.tokens[root:]),
            parents=(-1, *(parent - root for parent in tree.parents[root + 1 :])),
            sources=tuple(tree.sources[root:]),
            predictions=name(self.predictions[root:]),
            path=tuple(node - root for node in self.path[root + 1 :]),
            bonus=name([self.bonus])[0],
            draft_ms=self.ms(Stage.DRAFT),
            pass_ms=self.ms(Stage.PREFILL, Stage.VERIFY),
            judge_ms=self.ms(Stage.JUDGE),
        )


def drafted_tokens(records: Sequence[PassRecord], num_tokens: int) -> list[bool]:
    """Whether each token of an answer was an accepted draft; what a grammar forced was none.

    Forced tokens are the nodes before the root of the next pass, or the last ones of an answer.
    """
    found: list[bool] = []
    for one in records:
        found += [False] * one.tree.root + [True] * one.accepted + [False]
    return [*found, *[False] * (num_tokens - len(found))][:num_tokens]


class PassTraces(CountedPasses):
    """Passes that are described when they are first looked at; their number is known before.

    Equal to any sequence of the same passes. Any thread may ask.
    """

    def __init__(self, records: Sequence[PassRecord], name: Name = tuple) -> None:
        """`name` makes of tokens what they are called outside."""
        self._records, self._name = records, name
        self.accepted_lengths = tuple(record.accepted for record in records)

    @cached_property
    def _described(self) -> tuple[PassTrace, ...]:
        return tuple(record.describe(self._name) for record in self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        return self._described[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._described == tuple(other)

    def __hash__(self) -> int:
        return hash(self._described)

    def __reduce__(self) -> tuple[type[tuple[PassTrace, ...]], tuple[tuple[PassTrace, ...]]]:
        return tuple, (self._described,)
