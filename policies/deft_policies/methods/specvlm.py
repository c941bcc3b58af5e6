"""SpecVLM (EMNLP 2025): a tree from a model that looks at a tenth of the image patches.

A draft is accepted where it is the target's own token. The draft model sees the same prompt with
90 % of its patches left out.

Drafts: EAGLE-1's static tree of 25.

Left out: the choice of patches by the target's attention; here they are spread evenly. And videos,
whose many frames are what the paper prunes.

Numbers: none: no small VLA is published to draft with.
"""

from deft_policies.decoding.knobs import read_share
from deft_policies.decoding.plan import TreeShape, plan

OPTIONS = {"patch_share": read_share}
METHODS = {"specvlm": "autoregressive:plans=specvlm,patch_share=0.1"}
PLANS = {"specvlm": (plan("pruned-tree", "", "small-model", TreeShape.eagle()),)}
