"""One token per pass: the reference, in answers and in time, for every other way of decoding."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deft_client.types import DecodeTrace, PassTrace
from deft_policies.decoding.records import Stage, StageClock, require_finite
from deft_policies.decoding.sampling import Greedy, TokenChooser, all_finite, first_maximum, top_gap
from deft_policies.decoding.target import Prompts, Scores, TargetModel
from deft_policies.decoding.tree import DraftTree

AUTOREGRESSIVE = "autoregressive"


@dataclass(frozen=True)
class AutoregressiveDecoder:
    """Prefill, then one pass per token but the last: L tokens take L passes, never L + 1.

    The number of tokens is given, so no end-of-sequence token is looked for. Margins cost a second
    search through the logits: traces hold them only where they are wanted.
    """

    target: TargetModel
    chooser: TokenChooser = field(default_factory=Greedy)
    wants_margins: bool = False

    def decode(self, prompts: Prompts, num_tokens: int, clock: StageClock) -> list[DecodeTrace]:
        """Decode `num_tokens` tokens for every row of the batch; reads from the device once."""
        rounds = _Rounds(self, clock)
        tree = DraftTree.root_only(prompts.last_tokens)
        scores, _ = self.target.prefill(replace(prompts, keep_hidden=False), tree)
        token = rounds.settle(scores, Stage.PREFILL)
        root = torch.zeros_like(tree.tokens)
        one = torch.ones_like(prompts.last_tokens)
        for _ in range(num_tokens - 1):
            scores = self.target.score(DraftTree.root_only(token))
            self.target.commit(root, one)
            token = rounds.settle(scores, Stage.VERIFY)
        return rounds.read_back(prompts.last_tokens)


class _Rounds:
    """Collects what the passes yield, on the device."""

    def __init__(self, decoder: AutoregressiveDecoder, clock: StageClock) -> None:
        self._decoder, self._clock = decoder, clock
        self._tokens: list[Tensor] = []
        self._predicted: list[Tensor] = []
        self._margins: list[Tensor] = []
        self._sums: list[Tensor] = []  # of all logits, [row] for each pass
        self._laps: list[int] = []

    def settle(self, scores: Scores, stage: Stage) -> Tensor:
        """Choose the next token of every row, [row], and book the pass."""
        first = self._decoder.target.vocabulary.first
        logits = scores.logits[:, 0]
        self._sums.append(logits.sum(dim=1))
        best = first_maximum(logits)
        predicted = best + first if first else best
        token = predicted
        if not isinstance(self._decoder.chooser, Greedy):
            token = self._decoder.chooser.choose(logits) + first
        if self._decoder.wants_margins:
            self._margins.append(top_gap(logits, best))
        self._tokens.append(token)
        self._predicted.append(predicted)
        self._laps.append(self._clock.lap(stage))
        return token

    def read_back(self, last_tokens: Tensor) -> list[DecodeTrace]:
        """Bring everything to the host; raises `NotFiniteError`."""
        predicted = torch.stack(self._predicted, dim=1)
        columns = torch.stack((last_tokens, *self._tokens), dim=1)
        margins = torch.stack(self._margins, dim=1).tolist() if self._margins else None
        is_finite = all_finite(self._sums)[:, None]
        read = torch.cat((is_finite, columns, predicted), dim=1).tolist()
        require_finite([row[:1] for row in read])
        times = [self._clock.milliseconds(lap) for lap in self._laps]
        length = predicted.shape[1]
        return [
            _trace(row[1 : length + 2], row[length + 2 :], margins[i] if margins else [], times)
            for i, row in enumerate(read)
        ]


def _trace(
    columns: list[int], predicted: list[int], margins: list[float], times: list[float]
) -> DecodeTrace:
    """`columns` is the last prompt token and the chosen ones: each is the root of the next pass."""
    passes = tuple(
        PassTrace(
            is_prefill=index == 0,
            tokens=(columns[index],),
            parents=(-1,),
            sources=("",),
            predictions=(predicted[index],),
            path=(),
            bonus=columns[index + 1],
            pass_ms=pass_ms,
        )
        for index, pass_ms in enumerate(times)
    )
    return DecodeTrace(AUTOREGRESSIVE, tuple(columns[1:]), tuple(predicted), tuple(margins), passes)
