"""The grammar of FAST answers, token by token, as the decoder asks for it.

Codes have whatever ids the model gives them. Nothing else may stand in an answer, but the end
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
from deft_policies.fast.grammar import LOST, ChunkGrammar, Place
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
        found: list[int] = self.columns.tolist()
        return found

    @cached_property
    def codes(self) -> Mapping[int, int]:
        """The code of each token that stands for one."""
        return {token: code for code, token in enumerate(self.tokens)}

    def after(self, place: Place, tokens: Sequence[int]) -> Place:
        """The place behind tokens; `LOST` where they hold any that may not follow."""
        for token in tokens:
            code = self.codes.get(token)
            place = LOST if code is None else self.chunk.after(place, code)
        return place


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
        """Forbid what may not follow each node; behind a guess that may not stand nothing is."""
        if self.before is not None:
            logits = self.before.adjust(logits, answer, tree)
        draws = answer.method.temperature > 0.0
        free = draw_tokens(answer, tree, logits) if draws else first_maximum(logits)
        self._free.append((len(answer.tokens), free))
        chunk, columns, end = self.shared.chunk, self.shared.columns, self.shared.end
        places = self._places(answer, tree)
        none = np.zeros(len(columns), np.bool_)
        rows = [none if place == LOST else chunk.allowed(place) for place in places]
        allowed = to_device(np.stack(rows), logits.device)
        is_lost = to_device([place == LOST for place in places], logits.device, torch.bool)
        is_whole = to_device([chunk.is_whole(place) for place in places], logits.device, torch.bool)
        masked = torch.full_like(logits, FORBIDDEN)
        codes = logits.index_select(1, columns).masked_fill_(~allowed, FORBIDDEN)
        masked.index_copy_(1, columns, codes)
        masked[:, end] = logits[:, end].masked_fill(~is_whole, FORBIDDEN)
        return torch.where(is_lost[:, None], logits, masked)

    def _places(self, answer: Answer, tree: DraftTree) -> list[Place]:
        """Where the answer stands behind each node."""
        shared, start = self.shared, self.shared.chunk.start
        if answer.records:
            known = [*answer.tokens[: answer.num_cached], tree.tokens[0]]
            places = [shared.after(start, known)]
        else:  # the last token of the prompt is none of the answer's
            places = [start]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            places.append(shared.after(places[parent], [token]))
        return places

    def forced(self, tokens: Sequence[int]) -> Sequence[int]:
        """The end behind the last coefficient, and codes that alone can follow."""
        shared, chunk = self.shared, self.shared.chunk
        place = shared.after(chunk.start, tokens)
        found: list[int] = []
        while (code := chunk.only_code(place)) is not None:
            found.append(shared.tokens[code])
            place = chunk.after(place, code)
        return [*found, shared.end] if chunk.is_whole(place) else found

    def free_tokens(self, answer: Answer) -> list[int]:
        """What the model would have written in each token's place, had nothing been forbidden.

        Where one token alone could follow, as the end, it was not asked.
        """
        found, shared = list(answer.tokens), self.shared
        passes = list(zip(self._free, answer.records, strict=False))
        likeliest = iter(torch.cat([free for (_, free), _ in passes]).tolist() if passes else ())
        for (first, free), record in passes:
            tokens = [next(likeliest) for _ in range(len(free))]
            for index, node in enumerate(record.path[record.tree.root :], first):
                if index < len(found):  # an answer may be cut at its limit
                    found[index] = tokens[node]
        place = shared.chunk.start
        for index, token in enumerate(answer.tokens):
            if token == shared.end or shared.chunk.only_code(place) is not None:
                found[index] = token
            place = shared.after(place, [token])
        return found
