"""What draft heads of the model's width take for one answer, captured."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from deft_policies.decoding.drafts.block import BlockDrafts
from deft_policies.decoding.drafts.captured_head import Way
from deft_policies.decoding.drafts.heads import EagleDrafts
from deft_policies.decoding.planner import WIDEST
from deft_policies.model.block_head import BlockHead, block_sizes
from scripts.bench.gpu.asking import Row
from scripts.bench.gpu.setting import MeasuredRunner, Setting
from scripts.scripted_drafts import random_head

_ACTION = 7  # tokens of an answer
_READ = (0.25, 0.5, 0.75)  # of the way through the layers: states that a block head reads


@torch.inference_mode()
def heads(setting: Setting) -> Iterator[Row]:
    """An EAGLE-style head and a block head of one layer each: every captured step, replayed."""
    target = setting.new_target(setting.reserve(1))
    runner, sizes = target.runner, setting.config.llm
    assert isinstance(runner, MeasuredRunner)
    passes = target.set_aside(target.new_cache(), WIDEST, _ACTION + 1)
    assert passes is not None
    read = tuple(max(1, round(share * sizes.num_layers)) for share in _READ)
    with torch.device("meta"):
        block = BlockHead(block_sizes(sizes, target.action_tokens, tuple(dict.fromkeys(read))))
    for name, source in (
        ("EAGLE-style head", EagleDrafts(random_head(setting.network), target)),
        ("block head", BlockDrafts(_random(block, setting), target)),
    ):
        count = len(runner.captures)
        source.capture(passes.layout)
        for one in runner.captures[count:]:
            yield {
                "head": name,
                "step": _name_of(one.key),
                "ms": setting.median_ms(one.step.replay),
                "to capture, s": one.seconds,
            }


def _random(head: BlockHead, setting: Setting) -> BlockHead:
    """With random weights on the device."""
    head = head.to(setting.dtype).to_empty(device=setting.device)
    for module in head.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            else:
                nn.init.constant_(parameter, 1.0 if "weight" in name else 0.0)
    return head.requires_grad_(False).eval()


def _name_of(key: Any) -> str:
    """What a head's captured step does."""
    what = key[-1]
    if isinstance(what, Way):
        chosen = "drawn" if what.is_drawn else "likeliest"
        return f"a tree, {chosen}" + ", of all words" * what.whole_vocabulary
    if isinstance(what, bool):
        return "a chain" if what else "a tree"
    return f"a {what}"
