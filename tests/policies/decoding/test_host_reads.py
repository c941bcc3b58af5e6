"""Between prefill and last token the host reads from the device once per round, and no more.

Shown without a GPU: all of decoding runs on meta tensors, which have shapes but no values. Whatever
would make the host wait for a value (tolist, item, bool, indexing by a mask) fails on them, so what
runs through cannot do so; the one read of a round is answered by a script and counted. The trace
is read when an answer has ended.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deft_policies.decoding import batch, kinds, steps
from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.batch import AnswerSpec, Row
from deft_policies.decoding.drafts.retrieval import RetrievalIndex
from deft_policies.decoding.engine import DraftModels, Engine
from deft_policies.decoding.kinds import OUR_KINDS
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.plan import Plan, TreeShape
from deft_policies.decoding.target import Prompts, Target
from deft_policies.memory import SessionMemory
from deft_policies.model.draft_heads import EagleHead, MedusaHeads, head_sizes
from deft_policies.model.llama import LlamaDecoder
from tests.policies.decoding.scripts import METHODS, clock
from tests.tiny_target import ACTIONS, LENGTH, NUM_PATCHES, WIDTH, tiny_decoder

META = torch.device("meta")
NUM_ROWS = 2
FORM = AnswerSpec.action(ActionSpace.in_bins(LENGTH))
SHAPES = (
    TreeShape(5, 4, 20),
    TreeShape(5, 4, 20, is_full_depth=True),
    TreeShape.template(levels=5, reach=3),
)


def meta_target() -> Target:
    with torch.device(META):
        decoder = LlamaDecoder(tiny_decoder().sizes)
    return Target(decoder.requires_grad_(False), ACTIONS)


def meta_models() -> DraftModels:
    with torch.device(META):
        head = EagleHead(head_sizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False)
        medusa = MedusaHeads(WIDTH, 6).requires_grad_(False)
        keys = torch.empty(9, 6 + WIDTH)
        actions = torch.empty(9, LENGTH, dtype=torch.int64)
    index = RetrievalIndex(keys, actions, "meta")
    return DraftModels(head=head, medusa=medusa, index=index, small_model=meta_target())


def meta_prompts() -> Prompts:
    embeds = torch.empty(NUM_ROWS, 12, WIDTH, device=META)
    numbers = torch.empty(NUM_ROWS, dtype=torch.int64, device=META)
    features = torch.empty(NUM_ROWS, 6, device=META)
    return Prompts(embeds, numbers, numbers, slice(1, 1 + NUM_PATCHES), features)


def reads_and_passes(
    method: Method, monkeypatch: pytest.MonkeyPatch, form: AnswerSpec = FORM
) -> tuple[int, int]:
    """Decode on meta tensors; a read tells that rows go on by two and by three tokens."""
    reads = []

    def read(parts: Sequence[Tensor]) -> list[list[list[int]]]:
        assert {one.device for one in parts} == {META}
        reads.append(parts)
        is_finite, slots, *passes = [[[1] * one.shape[1] for _ in range(len(one))] for one in parts]
        for found, row in zip(slots, rows, strict=False):
            found[0] = row.number  # whose the slot is
        records = max((row.records for row in rows), key=len)
        for lists, record in zip(passes, records[-len(passes) :], strict=True):
            for found, row, kept in zip(lists, rows, (1, 2), strict=False):
                found[:2] = min(kept, record.num_steps - 1), row.number
        return [is_finite, slots, *passes]

    def read_when_ended(parts: Sequence[Tensor]) -> list[list[list[int]]]:
        return [[[0] * one.shape[1] for _ in range(len(one))] for one in parts]

    monkeypatch.setattr(steps, "read_lists", read)
    monkeypatch.setattr(batch, "read_lists", read_when_ended)
    own = tuple((30 + step,) * LENGTH for step in range(3))
    memory = SessionMemory(own=own, drift=(0.0,) * LENGTH, answer=(7,) * 20)
    rows = [Row(method, form, memory) for _ in range(NUM_ROWS)]
    engine = Engine(meta_target(), meta_models())
    with torch.inference_mode():
        engine.decode(meta_prompts(), rows, clock())
    return len(reads), max(row.num_passes for row in rows)


def planned(plan: Plan) -> Method:
    return replace(METHODS[1], plans=(plan,), is_guarded=False)


@pytest.mark.parametrize("method", METHODS[1:], ids=[method.name for method in METHODS[1:]])
def test_no_rule_reads_anything(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    # Looking n-grams up has tests of its own: it does read.
    method = replace(method, multi_level=False, is_guarded=False)
    num_reads, num_passes = reads_and_passes(method, monkeypatch)
    assert num_reads <= num_passes


@pytest.mark.parametrize("kind", OUR_KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=["dynamic", "fixed", "template"])
def test_no_source_reads_anything(
    kind: str, shape: TreeShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan("case", (kind, kinds.PREVIOUS), (kind,), shape)
    num_reads, num_passes = reads_and_passes(planned(plan), monkeypatch)
    assert num_reads == num_passes > 2


def test_several_sources_together_read_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("all", OUR_KINDS, OUR_KINDS)
    num_reads, num_passes = reads_and_passes(planned(plan), monkeypatch)
    assert num_reads == num_passes


def test_a_text_drafted_from_the_last_one_reads_once_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the target has said behind the old words comes with what was committed."""
    text = AnswerSpec(24, stop=5)
    num_reads, num_passes = reads_and_passes(find_method("lossless:guard=off"), monkeypatch, text)
    assert num_reads == num_passes > 2


def test_plain_decoding_reads_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads_and_passes(METHODS[0], monkeypatch) == (1, LENGTH)


def test_meta_tensors_do_catch_a_read() -> None:
    with pytest.raises(RuntimeError):
        torch.empty(2, device=META).tolist()
    with pytest.raises(RuntimeError):
        bool(torch.empty(1, device=META).any())
    with pytest.raises(RuntimeError):
        torch.empty(3, device=META)[torch.empty(3, dtype=torch.bool, device=META)]
