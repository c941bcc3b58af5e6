"""What an answer does not wait for: the words for its passes."""

import pickle
from dataclasses import dataclass, field, replace

from deft_client.types import DecodeTrace, PassTrace
from deft_policies.decoding.batch import LazyPassTraces, Name

PASSES = tuple(
    PassTrace(number == 0, (5, 6), (-1, 0), ("", "head"), (6, 7), (1,) * number, 8)
    for number in range(2)
)


@dataclass
class Described:
    """A pass that notes when it is asked for."""

    number: int
    asked: list[int] = field(default_factory=list)

    def describe(self, slot: int, name: Name) -> PassTrace:
        assert slot == 3
        self.asked.append(self.number)
        return PASSES[self.number]


def later_passes(asked: list[int]) -> LazyPassTraces:
    return LazyPassTraces([Described(number, asked) for number in range(2)], 3)  # type: ignore[list-item]


def test_passes_are_put_into_words_once_and_when_they_are_looked_at() -> None:
    asked: list[int] = []
    trace = DecodeTrace("spec-vla", (6, 8), (6, 8), (), later_passes(asked))
    assert trace.num_passes == 2
    assert replace(trace, method="fly").num_passes == 2
    assert asked == []
    assert trace.accepted_lengths == (0, 1)
    assert (trace.passes[1], trace.passes[:1]) == (PASSES[1], PASSES[:1])
    assert asked == [0, 1]


def test_a_trace_with_later_passes_is_the_same_value_as_one_with_passes() -> None:
    plain = DecodeTrace("spec-vla", (6, 8), (6, 8), (), PASSES)
    later = replace(plain, passes=later_passes([]))
    assert plain == later
    assert later == plain
    assert hash(plain) == hash(later)
    assert later != replace(plain, passes=PASSES[:1])
    assert pickle.loads(pickle.dumps(later)) == plain
