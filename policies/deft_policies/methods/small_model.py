"""Small model (Leviathan et al. 2023): standard speculative decoding.

A cheaper model of the same actions drafts a chain of 5; a draft is accepted where it is the
target's own token. An action token of the target is the model's token of the same bin, so the
vocabularies may differ. `patch_share` is the share of the image patches that it looks at.

Numbers: docs/results/methods.md.
"""

from deft_policies.decoding.knobs import read_share
from deft_policies.decoding.plan import TreeShape, plan

OPTIONS = {"patch_share": read_share}
METHODS = {"small-model": "autoregressive:plans=small-model"}
PLANS = {"small-model": (plan("chain", "", "small-model", TreeShape.chain(5)),)}
