"""Block (DFlash and DSpark, 2026): a small network drafts several tokens in one pass.

In the papers' letters: h are the target's hidden states behind some layers, side by side, at every
committed position, and a is the last committed token, whose states are not known yet. A backbone of
one to three layers reads fused h and a block of places: the embedding of a, then the same learned
vector at each further place. Places see each other and all of h. Place k gives logits for the k-th
token behind a: those of the target's own head, plus

    W2 W1[token before]

a low-rank bias (Markov head) by the token drafted just before it. Drafting so costs one pass,
however many tokens. A draft is accepted where it is the target's own token.

Drafts: `block` drafts a chain, `block-tree` a tree over the places of one block. A confidence head
estimates how likely each draft is accepted if all before it are. An exact method verifies a chain
as far as the product of these estimates is at least 0.2; a relaxed method verifies all of it,
because its answers depend on it. Any rule takes the head's drafts with `drafts=block`:
`within-bins:radius=9,drafts=block,tree=chain+7`.

`deft train fit --set kind=block` makes a head, for any family (docs/training.md).

Left out: gated and recurrent Markov heads, and widths by price: DSpark verifies the drafts that
commit most tokens in a millisecond, here the threshold above decides. DSpark's published drafters
are not read: they belong to text models (Qwen3), none of which is a decoder here, and begin further
places with the embedding of a mask token where this head has a vector of its own.

Numbers: docs/results/block-head/page.md. Beside the EAGLE-style head that ships with tiny-libero,
with as many drafts, a block head commits more tokens a pass, exact and within 9 bins, as a chain
and as a tree, and drafts in about half of the time. Within 9 bins its chain is faster than plain
decoding on that CPU. No exact row is: drafting and wider passes cost more than the passes that are
saved. So no default drafts with a block head, and none ships. A head of a small pi0-FAST:
docs/pi0fast.md.
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
