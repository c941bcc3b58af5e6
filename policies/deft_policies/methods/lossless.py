"""Lossless: the same actions as plain decoding, in fewer passes.

With t the target's own token, a draft d is accepted if d = t. So whatever drafts, the answer is
that of plain decoding. Greedy decoding and sampling alike: the noise of a draw belongs to a token's
position and not to the draft.

Drafts: the session's last action in the prefill, where checking it costs next to nothing. Behind it
the guard chooses a plan: nothing, the head, or the last action again. A text is drafted from the
session's last text.

Left out: the ratio test, which also samples exactly, accepts more drafts and gives other tokens for
the same seed. That is `ratio-test`.

Numbers: docs/results/same_answers.md and docs/results.md.
"""

METHODS = {"lossless": "autoregressive:plans=ours,guard=on"}
