"""What an answer does not wait for: the words for its passes. Their numbers are on the host."""

import pickle
from collections.abc import Sequence
from dataclasses import replace

import torch

from deft_client.types import DecodeTrace, PassTrace
from deft_policies.decoding.batch import LazyPassTraces, PassRecord
from deft_policies.decoding.clock import Stage
from deft_policies.decoding.kinds import source_number

SLOT = 3
PASSES = tuple(
    PassTrace(number == 0, (5, 6), (-1, 0), ("", "head"), (6, 7), (1,) * number, 6 + number, 1500.0)
    for number in range(2)
)


def named(asked: list[Sequence[int]], tokens: Sequence[int]) -> tuple[int, ...]:
    """What tokens are called outside; notes for which it is asked."""
    asked.append(tokens)
    return tuple(tokens)


def later_passes(asked: list[Sequence[int]]) -> LazyPassTraces:
    """The same two passes, as they lie on the device behind those of another row."""
    records = []
    for kept in range(2):
        numbers = [kept, 0, 6, 7, 6, 7, 5, 6, 6, 7, -1, 0, -1, source_number("head"), 1, 1, 0, 1]
        columns = torch.tensor([[0] * (len(numbers) + 1), [*numbers, 6 + kept]])
        laps = [(Stage.DRAFT, 1.0, 2.0), (Stage.DRAFT, 2.0, 2.5)]
        records.append(PassRecord(columns, 2, 2, SLOT - 1, kept == 0, laps))  # type: ignore[arg-type]
    return LazyPassTraces(records, SLOT, lambda tokens: named(asked, tokens))


def test_passes_are_put_into_words_once_and_when_they_are_looked_at() -> None:
    asked: list[Sequence[int]] = []
    trace = DecodeTrace("spec-vla", (6, 8), (6, 8), (), later_passes(asked))
    assert trace.num_passes == 2
    assert replace(trace, method="fly").num_passes == 2
    assert trace.accepted_lengths == (0, 1)
    assert asked == []
    assert (trace.passes[1], trace.passes[:1]) == (PASSES[1], PASSES[:1])
    described = len(asked)
    assert tuple(trace.passes) == PASSES
    assert len(asked) == described


def test_passes_are_described_as_they_were_when_the_answer_ended() -> None:
    """A device goes on to write elsewhere, and nobody who looks later may wait for it."""
    numbers = torch.tensor([[0, 0, 6, 6, 5, 6, -1, -1, 1, 0, 6]])
    later = LazyPassTraces([PassRecord(numbers, 1, 1, 0, True, [])], 0)
    numbers.zero_()
    assert later[0] == PassTrace(True, (5,), (-1,), ("",), (6,), (), 6)


def test_a_trace_with_later_passes_is_the_same_value_as_one_with_passes() -> None:
    plain = DecodeTrace("spec-vla", (6, 8), (6, 8), (), PASSES)
    later = replace(plain, passes=later_passes([]))
    assert plain == later
    assert later == plain
    assert hash(plain) == hash(later)
    assert later != replace(plain, passes=PASSES[:1])
    assert pickle.loads(pickle.dumps(later)) == plain
