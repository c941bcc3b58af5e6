"""One token per pass: the reference, in answers and in time, for every other way of decoding."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deft_policies.decoding.sampling import Greedy, TokenChooser
from deft_policies.decoding.target import Prompts, Scores, TargetModel
from deft_policies.decoding.trace import Answers, Decoded, PassRecord, Stage, StageClock, read_back
from deft_policies.decoding.tree import DraftTree

METHOD = "autoregressive"


@dataclass(frozen=True)
class AutoregressiveDecoder:
    """Prefill, then one pass per token but the last: L tokens take L passes, never L + 1.

    The number of tokens is given, so no end-of-sequence token is looked for.
    """

    target: TargetModel
    chooser: TokenChooser = field(default_factory=Greedy)
    wants_margins: bool = False

    def decode(self, prompts: Prompts, num_tokens: int, clock: StageClock) -> Decoded:
        """Decode `num_tokens` tokens for every row of the batch."""
        rounds = _Rounds(self, clock, prompts.last_tokens)
        tree = DraftTree.root_only(prompts.last_tokens)
        scores, _ = self.target.prefill(replace(prompts, keep_hidden=False), tree)
        token = rounds.settle(tree, scores)
        for _ in range(num_tokens - 1):
            tree = DraftTree.root_only(token)
            scores = self.target.score(tree)
            self.target.commit(rounds.root, rounds.one)
            token = rounds.settle(tree, scores)
        return rounds.read_back()


class _Rounds:
    """Collects what the passes yield, on the device."""

    def __init__(self, decoder: AutoregressiveDecoder, clock: StageClock, like: Tensor) -> None:
        """`like` is [row] int64."""
        self._decoder, self._clock = decoder, clock
        self._tokens: list[Tensor] = []
        self._predicted: list[Tensor] = []
        self._margins: list[Tensor] = []
        self._records: list[PassRecord] = []
        self.root = torch.zeros_like(like)[:, None]  # [row, 1], the path that keeps the root alone
        self.one = torch.ones_like(like)  # [row]

    def settle(self, tree: DraftTree, scores: Scores) -> Tensor:
        """Choose the next token of every row and note the pass."""
        first = self._decoder.target.vocabulary.first
        logits = scores.logits[:, 0]
        predicted = logits.argmax(dim=-1) + first
        token = predicted
        if not isinstance(self._decoder.chooser, Greedy):
            token = self._decoder.chooser.choose(logits) + first
        if self._decoder.wants_margins:
            best = logits.topk(2, dim=-1).values
            self._margins.append(best[:, 0] - best[:, 1])
        self._tokens.append(token)
        self._predicted.append(predicted)
        is_prefill = not self._records
        self._records.append(
            PassRecord(
                is_prefill=is_prefill,
                tree=tree,
                predictions=predicted[:, None],
                path=self.root[:, :0],
                accepted=self.root[:, 0],
                bonus=token,
                pass_lap=self._clock.lap(Stage.PREFILL if is_prefill else Stage.VERIFY),
            )
        )
        return token

    def read_back(self) -> Decoded:
        """Everything chosen so far, on the host."""
        margins = torch.stack(self._margins, dim=1) if self._margins else None
        tokens = torch.stack(self._tokens, dim=1)
        answers = Answers(tokens, torch.stack(self._predicted, dim=1), margins)
        return read_back(METHOD, answers, self._records, self._clock)
