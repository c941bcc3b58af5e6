"""A policy with no model that thinks aloud: it says a list of texts in turn, and what each took."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from deft_core.reasoning import find_parts
from deft_core.types import ActionChunk, DecodeTrace, PassTrace
from deft_policies.base import PolicyAnswer, PolicyRequest
from deft_policies.errors import NoActionError
from tests.server.dashboard.talkative import TalkativePolicy
from tests.standins.policies import counted

CHARS = 4  # a token
KEPT = 30  # drafts a pass


class ThinkingPolicy(TalkativePolicy):
    """A text that does not speak of an action holds none."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self._texts = texts

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        return [self._think(one) for one in batch]

    def _think(self, request: PolicyRequest) -> PolicyAnswer:
        memory = counted(request.memory)
        text = self._texts[(memory.num_steps - 1) % len(self._texts)]
        asked = request.options
        chunk = self._answer(request)
        chunk = replace(
            chunk,
            trace=self._traced(text) if asked.want_trace else None,
            reasoning=text if asked.want_reasoning else None,
        )
        if "ACTION:" in text:
            return PolicyAnswer(chunk, memory)
        error = NoActionError("0 action tokens before the stop token, 7 are needed")
        error.reasoning = text
        return PolicyAnswer(ActionChunk(np.empty((0, 7))), memory, error)

    def _traced(self, text: str) -> DecodeTrace:
        edges = [stop // CHARS for _, _, stop in find_parts(text)]
        parts = tuple(np.diff([0, *edges]).tolist())
        tokens = tuple(range(sum(parts)))
        passes = []
        for first in range(0, len(tokens), KEPT + 1):
            kept = tokens[first : first + KEPT]
            nodes = range(len(kept) + 1)
            passes.append(
                PassTrace(
                    is_prefill=first == 0,
                    tokens=(0, *kept),
                    parents=tuple(node - 1 for node in nodes),
                    sources=("", *["previous-answer"] * len(kept)),
                    predictions=tuple(nodes),
                    path=tuple(nodes)[1:],
                    bonus=first + KEPT,
                    pass_ms=9.0 if first == 0 else 3.2,
                )
            )
        return DecodeTrace("lossless", tokens, tokens, (1.0,) * len(tokens), tuple(passes),
                           rule="exact", plan="previous-answer", parts=parts)  # fmt: skip
