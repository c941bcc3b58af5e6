"""Steps that are captured once and replayed for as long as the server runs."""

import gc

import torch
from torch import Tensor

from deft_policies.decoding.drafts.growth import GrowthStart, OpenNodes, grow_tree, indices_of
from deft_policies.decoding.plan import DraftKind, TreeShape, TreeTemplate
from deft_policies.model.graphs import CapturedRunner
from deft_policies.model.layout import Tensors
from deft_policies.model.leaves import copy_together
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


def test_memory_of_a_key_is_made_while_warming_up_and_stays_where_it_is() -> None:
    runner = CapturedRunner(RecordingCapturer())
    given = (torch.ones(2), torch.zeros(3, dtype=torch.int64))
    assert runner.place("a", given) is None
    with runner.warming_up():
        made = runner.place("a", given)
    assert made is not None
    before = [one.data_ptr() for one in made.tensors]
    swapped = runner.place("a", (torch.zeros(2), torch.ones(3, dtype=torch.int64)))
    assert swapped is made
    assert [one.data_ptr() for one in made.tensors] == before
    assert [one.tolist() for one in made.tensors] == [[0.0, 0.0], [1, 1, 1]]
    assert runner.place("b", given) is None


def test_a_step_may_write_to_the_memory_it_reads() -> None:
    """Two tensors change places: both are read before either is written."""
    runner = CapturedRunner(RecordingCapturer())
    with runner.warming_up():
        memory = runner.place("a", (torch.tensor([1]), torch.tensor([2])))
        assert memory is not None

        def step() -> Tensors:
            copy_together(memory.tensors, memory.tensors[::-1])
            return ()

        runner.run("swap", step, ())
    runner.place("a", (torch.tensor([1]), torch.tensor([2])))
    runner.run("swap", step, ())
    assert [int(one) for one in memory.tensors] == [2, 1]
