"""Block (DFlash and DSpark, 2026): a small network drafts several tokens in one pass.

Let h be the target's hidden states behind some layers, side by side, at every committed position,
and a the last committed token, whose states are not known yet. A backbone of one to three layers
reads fused h and a block of places: a, then the same learned vector at each further place. Its
places see each other and all of h. Place k gives logits for the k-th token behind a, by the
target's own head, plus

    W2 W1[token at the place before]

so that a place knows what was drafted before it. Drafting so costs one pass, however many tokens.

A confidence head says how likely a draft is accepted where all before it are. A chain of an exact
method is verified as far as the product of these is at least 0.2. A relaxed method verifies all
that was drafted, because its answers depend on it.

`deft train fit --set kind=block` makes a head, of any family (docs/training.md). `block` drafts a
chain, `block-tree` a tree over the places of one block. Any rule takes the head's drafts with
`drafts=block`: `within-bins:radius=9,drafts=block,tree=chain+7`.

Left out: gated and recurrent Markov heads, and prices of widths: verified is what is likely enough.

Numbers: none: no block head ships.
"""

from deft_policies.decoding.plan import TreeShape, plan

METHODS = {
    "block": "autoregressive:plans=block",
    "block-tree": "autoregressive:plans=block-tree",
}
PLANS = {
    "block": (plan("block", "", "block", TreeShape.chain(7)),),
    "block-tree": (plan("block-tree", "", "block"),),
}
