"""Steps that are captured once and replayed for as long as the server runs."""

import gc

import torch
from torch import Tensor

from deft_policies.decoding.drafts.growth import Level, template_indices, template_tree
from deft_policies.decoding.plan import TreeShape
from deft_policies.model.graphs import StepRunner, Tensors
from tests.fake_graphs import RecordingCapturer


def grow(log_probs: Tensor) -> Tensors:
    """A tree of a template over odds that are the same at every level."""

    def extend(nodes: Level) -> Tensor:
        return log_probs[:, None].expand(-1, nodes.tokens.shape[1], -1)

    deepest = torch.tensor([3])
    tokens, parents, *_ = template_tree(TreeShape.template(3, 3), log_probs, extend, deepest, 0)
    return tokens, parents


def test_a_recording_holds_what_it_reads_although_others_forget_it() -> None:
    """Templates' indices are remembered for the last 64 of them: a 65th freed those of a replay."""
    runner = StepRunner(RecordingCapturer().capture)
    odds = torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
    expected = [tensor.tolist() for tensor in runner.run("grow", grow, (odds,))]
    template_indices.cache_clear()
    gc.collect()
    assert [tensor.tolist() for tensor in runner.run("grow", grow, (odds,))] == expected
    assert [tensor.tolist() for tensor in grow(odds)] == expected
