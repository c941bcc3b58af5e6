"""Lossless: the same actions as plain decoding, in fewer passes.

A draft is accepted only where it is the target's own token, so whatever drafts, the answer is that
of plain decoding. The session's last action is drafted in the prefill, where checking it costs next
to nothing. Behind it the guard chooses a plan: nothing, the head, or the last action again. A text
is drafted from the session's last text.

Greedy decoding and sampling alike: the noise of a draw belongs to a token's position and not to
the draft.

Numbers: docs/results/same_answers.md and docs/results.md.
"""

METHODS = {"lossless": "autoregressive:plans=ours,guard=on"}
