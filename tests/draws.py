"""How many cases are tried: few at a desk, more in `make test-all`, all of them every night.

DEFT_DRAWS says it: 1 at a desk, 2 in `make test-all`, 10 every night.
"""

import os
from collections.abc import Sequence
from itertools import combinations, product
from typing import TypeVar

Case = TypeVar("Case")

TIMES = int(os.environ.get("DEFT_DRAWS", "1"))
IS_NIGHT = TIMES >= 10


def draws(count: int) -> int:
    """The number of random cases: `count` at a desk, DEFT_DRAWS times as many elsewhere."""
    return count * TIMES


def some(cases: Sequence[Case], count: int) -> list[Case]:
    """The first `count` cases, and every night all of them."""
    return list(cases if IS_NIGHT else cases[:count])


def pairwise(*values: Sequence[object]) -> list[tuple[object, ...]]:
    """Cases in which any value of a parameter meets any value of another one.

    Three or more parameters need fewer such cases than there are combinations. Every night it is
    all combinations.
    """
    every = list(product(*(range(len(one)) for one in values)))
    chosen, missing = every, {pair for case in every for pair in _pairs(case)}
    if not IS_NIGHT:
        chosen = []
        while missing:
            best = max(every, key=lambda case: len(missing & _pairs(case)))
            missing -= _pairs(best)
            chosen.append(best)
    return [tuple(one[place] for one, place in zip(values, case, strict=True)) for case in chosen]


def _pairs(case: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
    """Any two parameters, each as its place and the number of its value."""
    return set(combinations(enumerate(case), 2))
