"""Two runs on the same trials: which of them is better, and could it be luck?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from deft_client.libero.results import EpisodeRecord, Outcome
from deft_client.libero.results_store import Run
from deft_client.libero.statistics import mcnemar_exact

LUCK = 0.05  # p-values below it are called a difference


@dataclass(frozen=True)
class Comparison:
    """Paired by (suite, task, trial), over episodes that were judged in both runs."""

    first: str
    second: str
    num_pairs: int
    both: int
    only_first: int
    only_second: int
    neither: int
    num_same_actions: int  # pairs whose actions agree to the last bit
    p_value: float
    have_same_assets: bool

    @property
    def difference(self) -> float:
        """Success of the second minus success of the first, in shares; NaN without pairs."""
        if not self.num_pairs:
            return float("nan")
        return (self.only_second - self.only_first) / self.num_pairs

    @property
    def verdict(self) -> str:
        """What the numbers allow to say."""
        if not self.num_pairs:
            return "no trial was judged in both"
        if not self.have_same_assets:
            return "different assets: not comparable"
        if self.num_same_actions == self.num_pairs:
            return "identical actions"
        if self.p_value >= LUCK:
            return "no difference shown"
        return f"{self.first if self.only_first > self.only_second else self.second} is better"


def compare_all(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Comparison]:
    """Every pair of runs of one suite, in the order given, by the names given."""
    named = zip(runs, names, strict=True)
    for (first, first_name), (second, second_name) in combinations(named, 2):
        if first.header.suite == second.header.suite:
            yield compare(first, second, first_name, second_name)


def compare(first: Run, second: Run, first_name: str, second_name: str) -> Comparison:
    """Pair two runs and test the difference with McNemar's exact test."""
    others = {record.key: record for record in second.records if _is_judged(record)}
    pairs = [
        (record, others[record.key])
        for record in first.records
        if _is_judged(record) and record.key in others
    ]
    wins = [(_won(one), _won(other)) for one, other in pairs]
    only_first, only_second = wins.count((True, False)), wins.count((False, True))
    return Comparison(
        first=first_name,
        second=second_name,
        num_pairs=len(pairs),
        both=wins.count((True, True)),
        only_first=only_first,
        only_second=only_second,
        neither=wins.count((False, False)),
        num_same_actions=sum(np.array_equal(one.actions, other.actions) for one, other in pairs),
        p_value=mcnemar_exact(only_first, only_second),
        have_same_assets=first.header.assets == second.header.assets,
    )


def _is_judged(record: EpisodeRecord) -> bool:
    return record.outcome is not Outcome.ERRORED


def _won(record: EpisodeRecord) -> bool:
    return record.outcome is Outcome.SUCCEEDED
