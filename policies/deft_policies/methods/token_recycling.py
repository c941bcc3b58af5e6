"""Token Recycling (Luo et al. 2025): a tree of what the target last said after the same tokens.

A table holds, for every token, what the target predicted to come next when it last saw that token,
candidates that were rejected included. A draft is accepted where it is the target's own token.

Drafts: a tree of EAGLE-1's shape, read off the table.

Left out: the table over the whole vocabulary that outlives an answer. Here it is of action tokens
alone, begins with the session's actions and ends with the answer, so that the same session drafts
the same on any machine. Nor is the paper's own tree shape here.

Numbers: docs/results/methods.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from deft_policies.decoding.drafts import Guesses, ModelSource
from deft_policies.decoding.plan import TreeShape, plan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from deft_policies.decoding.sequence import Sequence
    from deft_policies.decoding.target import Target

_NEVER_SEEN = -100.0


class TokenRecycling(ModelSource):
    """A tree read off a table of what the target last predicted after each token.

    The table [token, next token] holds log-probabilities, of action tokens alone, candidates that
    were rejected included (Luo et al. 2025). It starts from the session's actions and ends with the
    answer, so that the same session drafts the same again on any machine. What followed a token in
    the session counts as certain, less one for every step that has passed since.
    """

    kind = "token-recycling"
    _steps = 16

    def __init__(self, target: Target) -> None:
        self._tokens = target.action_tokens

    def begin(self, sequence: Sequence) -> None:
        """Fill the table from what the session's target answered."""
        sequence.notes[self.kind] = self._remembered(sequence.past[-self._steps :])

    def observe(self, sequence: Sequence, hidden: Tensor, logits: Tensor) -> None:
        """What a pass predicts after a token replaces what was known of it; the larger of two."""
        assert sequence.last is not None
        import numpy as np

        table: NDArray[np.float32] = sequence.notes[self.kind]
        log_probs = logits[:, self._tokens.columns].log_softmax(dim=1).cpu().numpy()
        fresh: dict[int, NDArray[np.float32]] = {}
        for token, row in zip(sequence.last.tree.tokens, log_probs, strict=True):
            index = token - self._tokens.first
            if 0 <= index < len(self._tokens):
                fresh[index] = np.maximum(fresh[index], row) if index in fresh else row
        for index, row in fresh.items():
            table[index] = row

    def draft_all(self, sequences: Items[Sequence]) -> list[Guesses]:
        """Read a tree off each table."""
        return [self._read(sequence) for sequence in sequences]

    def _read(self, sequence: Sequence) -> Guesses:
        import torch

        from deft_policies.decoding.drafts.growth import grow, read_grown

        depth = sequence.draft_depth
        if depth <= 0:
            return []
        table = torch.from_numpy(sequence.notes[self.kind])[None]

        def after(tokens: Tensor) -> Tensor:
            return table[0, (tokens - self._tokens.first).clamp(0, len(self._tokens) - 1)]

        root = torch.tensor([[sequence.tokens[-1]]])
        grown = grow(
            sequence.shape.cut(depth),
            after(root)[:, 0],
            lambda level: after(level.tokens),
            torch.tensor([depth]),
            self._tokens.first,
        )
        return read_grown(grown, 1)[0]

    def _remembered(self, past: Items[Items[int]]) -> NDArray[np.float32]:
        """The newest of what followed a token in any step counts most."""
        import numpy as np

        size, first = len(self._tokens), self._tokens.first
        table = np.full((size, size), _NEVER_SEEN, dtype=np.float32)
        for age, step in reversed(list(enumerate(reversed(past)))):
            for before, behind in zip(step[:-1], step[1:], strict=True):
                if 0 <= before - first < size and 0 <= behind - first < size:
                    table[before - first, behind - first] = -float(age)
        return table


METHODS = {"token-recycling": "autoregressive:plans=token-recycling"}
PLANS = {"token-recycling": (plan("recycled-tree", "", "token-recycling", TreeShape.eagle()),)}
SOURCES = {"token-recycling": TokenRecycling}
MEANINGS = {"token-recycling": "what the model last predicted behind the same tokens"}
