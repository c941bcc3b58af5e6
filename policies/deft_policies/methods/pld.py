"""Prompt-lookup decoding (Saxena 2023): what followed the same tokens before.

A draft is accepted where it is the target's own token.

Drafts: the session's own actions are one long sequence. The last three tokens, or fewer if those
never occurred, are looked up at the same position of an earlier action, the newest first, and what
followed them is the draft. Tokens of different positions are never mixed. At most 16 actions are
searched.

Left out: the search in the prompt, for which the method is named: a robot's prompt holds no action.

Numbers: docs/results/methods.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deft_policies.decoding.drafts import DraftSource, Guesses, look_up
from deft_policies.decoding.plan import plan

if TYPE_CHECKING:
    from deft_policies.decoding.sequence import Sequence


class NgramLookup(DraftSource):
    """The action will go on as it did when the same tokens came before (prompt-lookup decoding).

    The session's own answers are one long sequence. The last three tokens (fewer if those never
    occurred) are looked up at the same phase of an earlier action, newest first, and what followed
    them there is the guess. Tokens of different positions are never mixed.
    """

    kind = "ngram"
    _longest = 3
    _steps = 16  # how far it looks back

    def draft(self, sequence: Sequence, depth: int) -> Guesses:
        """What followed at the best match."""
        chain = look_up(sequence.past[-self._steps :], sequence.tokens, self._longest)
        return [] if chain is None else [chain[:depth]]


METHODS = {"pld": "autoregressive:plans=ngram"}
PLANS = {"ngram": (plan("ngram", "ngram", "ngram"),)}
SOURCES = {"ngram": lambda target: NgramLookup()}
MEANINGS = {"ngram": "what followed the same tokens earlier in the session"}
