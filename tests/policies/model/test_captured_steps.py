"""Steps that are captured once and replayed for as long as the server runs."""

import gc

import torch
from torch import Tensor

from deft_policies.decoding.growth import GrowthStart, OpenNodes, grow_tree, indices_of
from deft_policies.decoding.plan import DraftKind, TreeShape, TreeTemplate
from deft_policies.model.graphs import CapturedRunner
from deft_policies.model.layout import Tensors
from tests.recorder import RecordingCapturer


def grow(log_probs: Tensor) -> Tensors:
    """A tree of a template over odds that are the same at every level."""
    roots = torch.zeros(1, dtype=torch.int64)
    start = GrowthStart(DraftKind.HEAD, roots, log_probs, roots + 3, first_token=0)

    def go_on(nodes: OpenNodes) -> Tensor:
        return log_probs[:, None].expand(-1, nodes.tokens.shape[1], -1)

    tree = grow_tree(TreeShape.of_template(TreeTemplate.harmonic(3, 3)), start, go_on)
    return tree.tokens, tree.parents


def test_a_recording_holds_what_it_reads_although_others_forget_it() -> None:
    """Templates' indices are remembered for the last 64 of them: a 65th freed those of a replay."""
    runner = CapturedRunner(RecordingCapturer())
    odds = torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
    expected = [tensor.tolist() for tensor in runner.run("grow", grow, (odds,))]
    indices_of.cache_clear()
    gc.collect()
    assert [tensor.tolist() for tensor in runner.run("grow", grow, (odds,))] == expected
    assert [tensor.tolist() for tensor in grow(odds)] == expected
