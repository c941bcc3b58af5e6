"""Medusa (Cai et al. 2024): parallel heads on the target draft several tokens at once.

In the paper's letters: with h_t the target's last hidden state, head k predicts the token k places
behind the next one,

    p_t^(k) = softmax(W2^(k) (SiLU(W1^(k) h_t) + h_t))

so that all heads cost a small product, and no pass of their own. A draft is accepted where it is
the target's own token.

Drafts: a tree of 5 levels with 8 branches, of which the 49 likeliest drafts stay. A head does not
see what the others draft: the odds of a level are the same under every branch. Any rule takes these
drafts with `drafts=medusa`.

`deft train fit --set kind=medusa` makes heads (docs/training.md); tiny-libero ships some.

Left out: typical acceptance, which relaxes by the target's entropy; an output layer for each head
(here each W2 is the target's own); the static tree that the paper fits to its heads; and training
the target along with them (Medusa-2).

Numbers: docs/results/tiny-libero/page.md, "Table 4's settings, one at a time: head and tree", where
Spec-VLA's radius judges them.
"""

from deft_policies.decoding.plan import plan

METHODS = {"medusa": "autoregressive:plans=medusa"}
PLANS = {"medusa": (plan("medusa", "", "medusa"),)}
