"""SpecVLM: a tree from a model that looks at a tenth of the image patches.

The draft model sees the same prompt with 90 % of its patches left out, and drafts EAGLE-1's static
tree of 25 drafts. A draft is accepted where it is the target's own token.

Left out: the paper chooses the patches by the target's attention. Here they are spread evenly.

Numbers: none: no small VLA is published to draft with.
"""

from deft_policies.decoding.knobs import read_share
from deft_policies.decoding.plan import TreeShape, plan

OPTIONS = {"patch_share": read_share}
METHODS = {"specvlm": "autoregressive:plans=specvlm,patch_share=0.1"}
PLANS = {"specvlm": (plan("pruned-tree", "", "small-model", TreeShape.eagle()),)}
