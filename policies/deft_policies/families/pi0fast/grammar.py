"""pi0-FAST's answers, token by token: `Action: `, FAST codes of one chunk, `|`.

The beginning and the end cost no pass. Where the decoder has the rows of answers alone, whether the
model would have written something else is asked once, by the whole head, when the answer has ended.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import PassRow, Scores, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.fast.answer import AnswerGrammar
from deft_policies.fast.grammar import ChunkState
from deft_policies.model.kv_cache import KVCache


class WatchedTarget(Target):
    """Keeps the hidden states of the last pass, by answer, for grammars to take."""

    hidden: Mapping[int, Tensor] = {}  # [node, width]

    def forward(self, cache: KVCache, rows: Sequence[PassRow]) -> Scores:
        """As any target, and remember what was computed."""
        scores = super().forward(cache, rows)
        self.hidden = {
            row.number: scores.hidden[scores.nodes(index, row.tree)].clone()
            for index, row in enumerate(rows)
        }
        return scores


FreeTokens = Callable[[Tensor], list[int]]  # hidden states [token, width] to the likeliest tokens


@dataclass(eq=False)
class Pi0FastGrammar(AnswerGrammar):
    """The grammar of one answer."""

    prefix: tuple[int, ...] = field(kw_only=True)  # the decoder's tokens of `Action: `
    target: WatchedTarget = field(kw_only=True)
    free: FreeTokens = field(kw_only=True)  # by the whole head
    # Of every pass: the index of the token behind node 0, and its nodes' hidden states.
    _seen: list[tuple[int, Tensor]] = field(default_factory=list)

    def adjust(self, logits: Tensor, answer: Answer, tree: DraftTree) -> Tensor:
        """Forbid what may not follow each node."""
        first = answer.num_cached + 1 if answer.records else 0
        self._seen.append((first, self.target.hidden[answer.number]))
        return super().adjust(logits, answer, tree)

    def _states(self, answer: Answer, tree: DraftTree) -> list[ChunkState]:
        """The state behind each node. Within the prefix it is not read, so any will do."""
        shared, num = self.shared, len(self.prefix)
        written = [*answer.tokens[: answer.num_cached], tree.tokens[0]] if answer.records else []
        states = [shared.after(shared.chunk.start, written[num:])]
        for node, parent in enumerate(tree.parents[1:], 1):
            is_prefix = not answer.records and node <= num
            added = [] if is_prefix else [tree.tokens[node]]
            states.append(shared.after(states[parent], added))
        return states

    def forced(self, tokens: Sequence[int]) -> Sequence[int]:
        """The rest of the prefix; behind it the codes that alone are allowed, and the end."""
        num = len(self.prefix)
        return self.prefix[len(tokens) :] if len(tokens) < num else super().forced(tokens[num:])

    def free_tokens(self, answer: Answer) -> list[int]:
        """The model's own token at each position of the answer, as if nothing had been forbidden.

        Behind the last pass, where the model was not run, it is the answer's token.
        """
        if answer.method.temperature > 0.0:  # drawn: of the tokens of answers alone
            return super().free_tokens(answer)
        indices, hidden = list[int](), list[Tensor]()
        for (first, seen), record in zip(self._seen, answer.records, strict=False):
            indices += range(first, first + len(record.path))
            hidden.append(seen[record.path])
        tokens = list(answer.tokens)
        for index, token in zip(indices, self.free(torch.cat(hidden)), strict=True):
            if index < len(tokens):  # an answer may be cut at its limit
                tokens[index] = token
        return tokens
