"""Recorded steps of the draft head read their inputs, the weights and the cache alone."""

import pytest
import torch

from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.decoder import DecodeRow, DraftModels, build_decoder
from deft_policies.decoding.drafts.eagle import EagleHead, HeadSizes
from deft_policies.decoding.history import ActionHistory
from deft_policies.decoding.knobs import find_method
from deft_policies.decoding.plan import DraftKind, KeyMask, TreeShape
from deft_policies.model.graphs import CapturedRunner
from tests.operation_recorder import RecordingCapturer
from tests.policies.decoding.scripts import clock
from tests.tiny_target import LENGTH, WIDTH, fast_target, random_prompts, tiny_decoder


def trees(key_mask: KeyMask, capturer: RecordingCapturer | None) -> list[list[object]]:
    """Every tree of a session whose prompts change from action to action."""
    decoder = tiny_decoder()
    torch.manual_seed(0)
    head = EagleHead(HeadSizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False)
    models = DraftModels(head=head, key_mask=key_mask)
    if capturer is not None:
        runner = CapturedRunner(capturer)
        models = DraftModels(head=head, key_mask=key_mask, new_runner=lambda: runner)
    method = find_method("lossless").with_drafts((DraftKind.HEAD,)).with_shape(TreeShape(3, 3, 9))
    drafting = build_decoder(fast_target(decoder), method, models)
    rows = [DecodeRow(ActionHistory(), ActionSpace.in_bins(LENGTH)) for _ in range(2)]
    found = []
    for number, lengths in enumerate(([5, 7], [7, 2], [3, 7], [7, 7])):
        prompts = random_prompts(decoder, lengths, seed=number)
        traces = drafting.decode(prompts, rows, clock())
        found.append([(one.tokens, one.parents) for trace in traces for one in trace.passes])
    return found


@pytest.mark.parametrize("key_mask", list(KeyMask))
def test_recorded_trees_equal_fresh_ones_while_prompts_change(key_mask: KeyMask) -> None:
    capturer = RecordingCapturer()
    assert trees(key_mask, capturer) == trees(key_mask, None)
    assert 0 < capturer.num_captured <= 12
