"""What a run leaves on the device, and how it is brought to the host: in one read, at the end."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deft_client.types import DecodeTrace, PassTrace
from deft_policies.decoding.drafts.source import PassResult
from deft_policies.decoding.guard import ActionCost
from deft_policies.decoding.plan import SOURCE_KINDS
from deft_policies.decoding.trace import StageClock


@dataclass(frozen=True)
class PassRecord:
    """One finished pass, and the laps of the clock in which it was drafted and run."""

    result: PassResult
    pass_lap: int
    draft_lap: int
    commit_lap: int | None = None  # of what the pass before it had to keep

    def ms(self, clock: StageClock) -> float:
        """All of the round."""
        laps = (self.pass_lap, self.draft_lap, self.commit_lap)
        return sum(clock.milliseconds(lap) for lap in laps if lap is not None)


@dataclass(frozen=True)
class ActionRun:
    """A finished batch, still on the device."""

    tokens: Tensor  # [row, position], executed
    own: Tensor  # [row, position], the target's own token given those executed before
    margins: Tensor | None  # [row, position], gap between the two largest logits there
    records: tuple[PassRecord, ...]

    def cost(self, clock: StageClock) -> ActionCost:
        """What the batch has cost."""
        first, *later = self.records
        is_open = zip(*(record.result.is_open for record in later), strict=True)
        num_passes = tuple(sum(row) for row in is_open) if later else (0,) * len(self.tokens)
        return ActionCost(first.ms(clock), sum(one.ms(clock) for one in later), num_passes)

    def read(self, clock: StageClock) -> list[DecodeTrace]:
        """Tell what happened in every row, but not by which method and why.

        Passes after a row was finished are left out of it.
        """
        numbers = _read_together([self.tokens, self.own, *_columns(self.records)])
        tokens, own = numbers[:2]
        margins = [[]] * len(tokens) if self.margins is None else self.margins.tolist()
        passes: list[list[PassTrace]] = [[] for _ in tokens]
        for index, record in enumerate(self.records):
            start = 2 + index * _NUM_COLUMNS
            columns = numbers[start : start + _NUM_COLUMNS]
            times = clock.milliseconds(record.draft_lap), clock.milliseconds(record.pass_lap)
            for row, is_open in enumerate(record.result.is_open):
                if is_open:
                    one = _pass_trace([column[row] for column in columns], record, times)
                    passes[row].append(one)
        return [
            DecodeTrace(
                method="",
                tokens=tuple(tokens[row]),
                predicted=tuple(own[row]),
                margins=tuple(margins[row]),
                passes=tuple(passes[row]),
            )
            for row in range(len(tokens))
        ]


def cost_of_plain(traces: Sequence[DecodeTrace]) -> ActionCost:
    """What a batch without any guesses has cost: the same for all of its rows."""
    first, *later = traces[0].passes
    return ActionCost(first.pass_ms, sum(one.pass_ms for one in later), (len(later),) * len(traces))


_NUM_COLUMNS = 8
_NAMES = (*(kind.value for kind in SOURCE_KINDS), "")  # the root's source is -1: the last


def _columns(records: Sequence[PassRecord]) -> list[Tensor]:
    columns: list[Tensor] = []
    for record in records:
        tree, verdict = record.result.tree, record.result.verdict
        columns += [
            tree.tokens,
            tree.parents,
            tree.sources,
            tree.is_real,
            record.result.predictions,
            verdict.path,
            verdict.num_accepted[:, None],
            verdict.bonus[:, None],
        ]
    return columns


def _read_together(parts: Sequence[Tensor]) -> list[list[list[int]]]:
    """Read many [row, width] integer tensors at the price of one transfer."""
    flat = torch.cat([part.flatten() for part in parts]).tolist()
    read, start = [], 0
    for part in parts:
        num_rows, width = part.shape
        read.append(
            [flat[start + row * width : start + (row + 1) * width] for row in range(num_rows)]
        )
        start += num_rows * width
    return read


def _pass_trace(
    columns: Sequence[list[int]], record: PassRecord, times: tuple[float, float]
) -> PassTrace:
    """One row's pass, without the nodes that were only padding."""
    tokens, parents, sources, is_real, predictions, path, accepted, bonus = columns
    real = [node for node, kept in enumerate(is_real) if kept]
    number = {node: index for index, node in enumerate(real)}
    number[-1] = -1
    return PassTrace(
        is_prefill=record.result.is_prefill,
        tokens=tuple(tokens[node] for node in real),
        parents=tuple(number[parents[node]] for node in real),
        sources=tuple(_NAMES[sources[node]] for node in real),
        predictions=tuple(predictions[node] for node in real),
        path=tuple(number[node] for node in path[1 : accepted[0] + 1]),
        bonus=bonus[0],
        draft_ms=times[0],
        pass_ms=times[1],
    )
