"""The grammar of FAST answers, token by token, as the decoder asks for it.

Codes have whatever ids the model gives them. Nothing else is allowed in an answer but the end
behind its last coefficient, which costs no pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from deft_policies.decoding.read import draw_tokens
from deft_policies.decoding.sampling import first_maximum
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import Grammar
from deft_policies.decoding.tree import DraftTree
from deft_policies.fast.grammar import DEAD, ChunkGrammar, ChunkState
from deft_policies.model.staging import to_device

# Of what may not follow. Finite, so that how far the largest logit is above the next one is, too.
FORBIDDEN = -1e30


@dataclass(frozen=True, eq=False)
class TokenGrammar:
    """A grammar of codes with the tokens that a decoder has for them. Shared by all answers."""

    chunk: ChunkGrammar
    columns: Tensor  # [code], the decoder's tokens, on its device
    end: int  # the decoder's token that ends an answer

    @cached_property
    def tokens(self) -> list[int]:
        """The decoder's token of each code."""
        tokens: list[int] = self.columns.tolist()
        return tokens

    @cached_property
    def codes(self) -> Mapping[int, int]:
        """The code of each token that has one."""
        return {token: code for code, token in enumerate(self.tokens)}

    def after(self, state: ChunkState, tokens: Sequence[int]) -> ChunkState:
        """The state behind tokens; `DEAD` if one of them was not allowed."""
        for token in tokens:
            code = self.codes.get(token)
            state = DEAD if code is None else self.chunk.after(state, code)
        return state


@dataclass(eq=False)
class AnswerGrammar:
    """Masks the logits of one answer, and remembers what the model would have written.

    `before` changes the logits first, by what came before, as a repetition penalty does.
    """

    shared: TokenGrammar
    before: Grammar | None = None
    # Of every pass: how many tokens came before it, and what would follow each node [node].
    _free: list[tuple[int, Tensor]] = field(default_factory=list)

    def adjust(self, logits: Tensor, answer: Answer, tree: DraftTree) -> Tensor:
        """Forbid what may not follow each node. Behind a forbidden guess nothing is forbidden."""
        if self.before is not None:
            logits = self.before.adjust(logits, answer, tree)
        draws = answer.method.temperature > 0.0
        free = draw_tokens(answer, tree, logits) if draws else first_maximum(logits)
        self._free.append((len(answer.tokens), free))
        chunk, columns, end = self.shared.chunk, self.shared.columns, self.shared.end
        states = self._states(answer, tree)
        none = np.zeros(len(columns), np.bool_)
        rows = [none if state == DEAD else chunk.allowed(state) for state in states]
        allowed = to_device(np.stack(rows), logits.device)
        is_dead = to_device([state == DEAD for state in states], logits.device, torch.bool)
        is_whole = to_device([chunk.is_whole(state) for state in states], logits.device, torch.bool)
        masked = torch.full_like(logits, FORBIDDEN)
        codes = logits.index_select(1, columns).masked_fill_(~allowed, FORBIDDEN)
        masked.index_copy_(1, columns, codes)
        masked[:, end] = logits[:, end].masked_fill(~is_whole, FORBIDDEN)
        return torch.where(is_dead[:, None], logits, masked)

    def _states(self, answer: Answer, tree: DraftTree) -> list[ChunkState]:
        """The state behind each node."""
        shared, start = self.shared, self.shared.chunk.start
        if answer.records:
            written = [*answer.tokens[: answer.num_cached], tree.tokens[0]]
            states = [shared.after(start, written)]
        else:  # the last token of the prompt is none of the answer's
            states = [start]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            states.append(shared.after(states[parent], [token]))
        return states

    def forced(self, tokens: Sequence[int]) -> Sequence[int]:
        """Codes that alone are allowed next, and the end behind the last coefficient."""
        shared, chunk = self.shared, self.shared.chunk
        state = shared.after(chunk.start, tokens)
        forced: list[int] = []
        while (code := chunk.only_code(state)) is not None:
            forced.append(shared.tokens[code])
            state = chunk.after(state, code)
        return [*forced, shared.end] if chunk.is_whole(state) else forced

    def free_tokens(self, answer: Answer) -> list[int]:
        """The model's own token at each position of the answer, as if nothing had been forbidden.

        Forced tokens, for which the model was not run, are the answer's.
        """
        free_tokens, shared = list(answer.tokens), self.shared
        passes = list(zip(self._free, answer.records, strict=False))
        likeliest = iter(torch.cat([free for (_, free), _ in passes]).tolist() if passes else ())
        for (first, free), record in passes:
            tokens = [next(likeliest) for _ in range(len(free))]
            for index, node in enumerate(record.path[record.tree.root :], first):
                if index < len(free_tokens):  # an answer may be cut at its limit
                    free_tokens[index] = tokens[node]
        state = shared.chunk.start
        for index, token in enumerate(answer.tokens):
            if token == shared.end or shared.chunk.only_code(state) is not None:
                free_tokens[index] = token
            state = shared.after(state, [token])
        return free_tokens
