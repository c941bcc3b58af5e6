"""How much faster drafting should be, by formula, and how much it was. Pure; prints nothing.

A draft stands with chance a, a pass looks at K of them in a row, drafting one costs c plain passes.
A pass then commits 1 + a + ... + a^K = (1 - a^(K+1)) / (1 - a) tokens and costs 1 + K c.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deft_client.types import DecodeTrace, PassTrace


def expected_tokens(acceptance: float, length: float) -> float:
    """Tokens a pass commits where each of `length` drafts in a row stands with this chance."""
    if acceptance >= 1.0:
        return length + 1
    missed: float = acceptance ** (length + 1)
    return (1 - missed) / (1 - acceptance)


def expected_speedup(acceptance: float, length: float, cost: float) -> float:
    """How many times faster than one token per pass; drafting one token costs `cost` passes."""
    return expected_tokens(acceptance, length) / (1 + length * cost)


@dataclass(frozen=True)
class Speedup:
    """Acceptance, draft length and cost as they were, and what they should and did bring.

    Over the passes behind the prefill that checked drafts. The prediction knows no end of the
    action and takes a pass over many nodes to cost what a pass over one costs; `pass_cost` says
    what it did cost.
    """

    acceptance: float
    length: float
    cost: float  # of drafting one token, in plain passes
    pass_cost: float  # of a pass and of judging it, in plain passes
    predicted: float
    measured: float

    @staticmethod
    def of(traces: Sequence[DecodeTrace], plain: Sequence[DecodeTrace]) -> "Speedup | None":
        """None where no pass behind the prefill checked drafts, or there are no times."""
        checked = [one for trace in traces for one in trace.checked_passes if not one.is_prefill]
        single = [one.pass_ms for trace in plain for one in trace.passes if not one.is_prefill]
        checked_ms = sum(one.pass_ms + one.judge_ms for one in checked)
        spent_ms = checked_ms + sum(one.draft_ms for one in checked)
        if not checked or not single or spent_ms == 0 or sum(single) == 0:
            return None
        pass_ms = sum(single) / len(single)
        levels = [depth_of(one) for one in checked]
        tries = [
            min(one.accepted_length + 1, most) for one, most in zip(checked, levels, strict=True)
        ]
        kept, length = sum(one.accepted_length for one in checked), sum(levels) / len(levels)
        acceptance = kept / sum(tries)
        cost = sum(one.draft_ms for one in checked) / sum(levels) / pass_ms
        committed = sum(one.committed_length for one in checked)
        return Speedup(
            acceptance=acceptance,
            length=length,
            cost=cost,
            pass_cost=checked_ms / len(checked) / pass_ms,
            predicted=expected_speedup(acceptance, length, cost),
            measured=committed * pass_ms / spent_ms,
        )


def depth_of(one: PassTrace) -> int:
    """Drafts in a row that a pass looks at: the depth of its tree."""
    depths = [0]
    for parent in one.parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)
