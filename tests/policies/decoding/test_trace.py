"""Traces of passes are put into words when somebody looks at them, not while an answer waits."""

import pickle
from dataclasses import replace

import pytest

from deft_core.types import DecodeTrace, PassTrace
from deft_policies.decoding.trace import PassRecord, PassTraces, drafted_tokens
from deft_policies.decoding.tree import DraftTree

TREE = DraftTree([5, 6, 7], [-1, 0, 0], ["", "head", "head"])
PASSES = (
    PassTrace(True, (5, 6, 7), (-1, 0, 0), ("", "head", "head"), (7, 8, 9), (2,), 9),
    PassTrace(False, (5, 6, 7), (-1, 0, 0), ("", "head", "head"), (8, 8, 9), (), 8),
)


def records() -> list[PassRecord]:
    return [
        PassRecord(True, TREE, [7, 8, 9], [0, 2], 9, []),
        PassRecord(False, TREE, [8, 8, 9], [0], 8, []),
    ]


def test_passes_are_described_once_and_when_they_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described: list[bool] = []
    describe = PassRecord.describe

    def noted(self: PassRecord, name: object) -> PassTrace:
        described.append(self.is_prefill)
        return describe(self, name)  # type: ignore[arg-type]

    monkeypatch.setattr(PassRecord, "describe", noted)
    traces = PassTraces(records())
    trace = DecodeTrace("spec-vla", (9, 8), (9, 8), (), traces)
    assert trace.num_passes == 2
    assert replace(trace, method="fly").num_passes == 2
    assert traces.accepted_lengths == (1, 0)
    assert described == []
    assert (trace.passes[1], trace.passes[:1]) == (PASSES[1], PASSES[:1])
    assert trace.passes == PASSES
    assert described == [True, False]


def test_a_trace_whose_passes_come_later_is_the_same_value() -> None:
    plain = DecodeTrace("spec-vla", (9, 8), (9, 8), (), PASSES)
    later = replace(plain, passes=PassTraces(records()))
    assert plain == later
    assert later == plain
    assert hash(plain) == hash(later)
    assert later != replace(plain, passes=PASSES[:1])
    assert pickle.loads(pickle.dumps(later)) == plain


def test_committed_tokens_before_the_root_are_no_part_of_a_trace() -> None:
    """A grammar's forced tokens are cached by the next pass, before its root."""
    tree = DraftTree([3, 4, 5, 6], [-1, 0, 1, 2], ["", "", "", "head"], root=2)
    record = PassRecord(False, tree, [4, 5, 6, 7], [0, 1, 2, 3], 7, [])
    assert record.describe(tuple) == PassTrace(
        False, (5, 6), (-1, 0), ("", "head"), (6, 7), (1,), 7
    )
    assert record.accepted == 1


def test_drafted_tokens_are_known_beside_those_that_a_grammar_forced() -> None:
    forced = DraftTree([3, 4, 5, 6], [-1, 0, 1, 2], ["", "", "", "head"], root=2)
    some = [
        PassRecord(True, TREE, [7, 8, 9], [0, 2], 9, []),  # a draft, and the target's own
        PassRecord(False, forced, [4, 5, 6, 7], [0, 1, 2, 3], 7, []),  # two forced before a draft
    ]
    assert drafted_tokens(some, 6) == [True, False, False, False, True, False]
    assert drafted_tokens(some, 8)[6:] == [False, False]  # forced behind the last pass
    assert drafted_tokens(some, 2) == [True, False]  # an answer that was cut
