"""Small model (Leviathan et al. 2023): standard speculative decoding.

In the paper's letters: a cheaper model M_q of the same actions drafts x_1 to x_gamma, and the
target M_p scores all of them in one pass. Decoding greedily, x_i is accepted where it is the
target's own token.

Drafts: a chain of gamma = 5. An action token of the target is the model's token of the same bin, so
the vocabularies may differ. `patch_share` is the share of the image patches that the model looks
at.

Left out: sampling with p and q, which is `ratio-test:drafts=small-model`, and the choice of gamma
by the acceptance rate and the price of M_q: it is fixed.

Numbers: docs/results/methods.md.
"""

from deft_policies.decoding.knobs import read_share
from deft_policies.decoding.plan import TreeShape, plan

OPTIONS = {"patch_share": read_share}
METHODS = {"small-model": "autoregressive:plans=small-model"}
PLANS = {"small-model": (plan("chain", "", "small-model", TreeShape.chain(5)),)}
