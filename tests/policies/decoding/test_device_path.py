"""Between prefill and final tokens the host reads from the device once per round, and no more.

Shown without a GPU: the whole loop runs on meta tensors, which have shapes but no values. Anything
that would make the host wait for a value (tolist, item, bool, indexing by a mask) fails on them, so
what runs through cannot do so; the one read of a round is answered by a script and counted.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deft_policies.decoding.acceptance.rule import ActionContext, ActionSpace, SpaceTensors
from deft_policies.decoding.decoder import DraftModels
from deft_policies.decoding.drafts.eagle import EagleHead, HeadSizes
from deft_policies.decoding.drafts.guessers import RetrievalIndex
from deft_policies.decoding.drafts.medusa import MedusaHeads, MedusaSizes
from deft_policies.decoding.drafts.sources import BatchDrafts, Seen
from deft_policies.decoding.history import ActionHistory, HistoryTensors
from deft_policies.decoding.llama_target import LlamaTarget, Room
from deft_policies.decoding.methods import METHODS, RIDES_IN_PREFILL, Method
from deft_policies.decoding.plan import OUR_KINDS, PLAIN, DraftKind, Plan, TreeShape, TreeTemplate
from deft_policies.decoding.records import ActionRun, Settled
from deft_policies.decoding.speculative import Round, Rounds, run_actions
from deft_policies.decoding.target import Prompts
from deft_policies.decoding.verify import Verifier
from deft_policies.model.layout import EagerRunner
from deft_policies.model.llama import LlamaDecoder
from tests.policies.decoding.scripts import clock
from tests.tiny_target import ACTIONS, LENGTH, NUM_PATCHES, WIDTH, tiny_decoder

META = torch.device("meta")
NUM_ROWS = 2


class CountedReads(ActionRun):
    """Answers the read of each round from a script: the rows go on by two and by three tokens."""

    num_reads = 0

    def read_from_device(self, table: Tensor) -> list[list[int]]:
        assert table.device == META
        self.num_reads += 1
        return [[min(self.num_reads * step, self.length)] for step in (2, 3)]


SHAPES = (
    TreeShape(5, 4, 20),
    TreeShape(5, 4, 20, is_full_depth=True),
    TreeShape.of_template(TreeTemplate.harmonic(levels=5, reach=3)),
)


def meta_target() -> LlamaTarget:
    with torch.device(META):
        decoder = LlamaDecoder(tiny_decoder().sizes)
    return LlamaTarget(decoder.requires_grad_(False), ACTIONS, room=Room(16, 64))


def meta_prompts() -> Prompts:
    embeds = torch.empty(NUM_ROWS, 12, WIDTH, device=META)
    numbers = torch.empty(NUM_ROWS, dtype=torch.int64, device=META)
    features = torch.empty(NUM_ROWS, 6, device=META)
    return Prompts(embeds, numbers, numbers, slice(1, 1 + NUM_PATCHES), features)


def meta_models() -> DraftModels:
    with torch.device(META):
        head = EagleHead(HeadSizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False)
        medusa = MedusaHeads(MedusaSizes(WIDTH, 6)).requires_grad_(False)
        keys = torch.empty(9, 6 + WIDTH)
        actions = torch.empty(9, LENGTH, dtype=torch.int64)
    index = RetrievalIndex(keys, actions, "meta")
    return DraftModels(head=head, medusa=medusa, index=index, small_model=meta_target())


def histories() -> Sequence[ActionHistory]:
    known = [ActionHistory() for _ in range(NUM_ROWS)]
    for history in known:
        for step in range(3):
            history.append([30 + step] * LENGTH, [30] * LENGTH, leak=1.0)
    return known


def run(method: Method, plan: Plan) -> tuple[CountedReads, int]:
    """Decode on meta tensors; returns the state and how many passes had guesses in them."""
    target, prompts, sessions = meta_target(), meta_prompts(), histories()
    sources = meta_models().sources_for(target, method)
    space = SpaceTensors.of([ActionSpace.in_bins(LENGTH)] * NUM_ROWS, META)
    steps = sources.steps_needed(plan)
    history = HistoryTensors.of(sessions, LENGTH, steps, META)
    needs_hidden = method.rule.needs_patches or sources.needs_hidden(plan)
    prompts = replace(prompts, keep_hidden=needs_hidden)
    verifier = Verifier(method.rule, method.tie_break, target.vocabulary.first)
    context = ActionContext(space, history.drift, history.num_steps)
    seen, settled = Seen(prompts, sessions, history, 64), Settled.nothing(space.groups, True)
    progress = settled.progress(prompts.last_tokens, fewest=0)
    drafting = BatchDrafts.of(sources, plan, seen, progress)
    rounds = Rounds(Round(target, drafting, verifier, context), settled, EagerRunner())
    run = CountedReads(NUM_ROWS, LENGTH)
    run_actions(rounds, prompts, run, clock())
    assert run.margins is not None
    assert run.margins.device == META
    return run, sum(one.report.has_guesses for one in run.records)


@pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])
def test_no_rule_reads_anything(method: Method) -> None:
    # Random draws and looking n-grams up have tests of their own: they do read.
    method = replace(method, draws_drafts=False, multi_level=False)
    state, num_passes = run(method, method.plans[0])
    assert state.num_reads == num_passes


@pytest.mark.parametrize("kind", list(OUR_KINDS), ids=[kind.value for kind in OUR_KINDS])
@pytest.mark.parametrize("shape", SHAPES, ids=["dynamic", "fixed", "template"])
def test_no_source_reads_anything(kind: DraftKind, shape: TreeShape) -> None:
    riders = (kind,) if kind in RIDES_IN_PREFILL else (DraftKind.PREVIOUS,)
    plan = Plan("case", riders, (kind,), shape)
    state, num_passes = run(METHODS[1], plan)
    assert state.num_reads == num_passes > 2


def test_several_sources_together_read_nothing_more() -> None:
    state, num_passes = run(METHODS[1], Plan("all", RIDES_IN_PREFILL[:3], OUR_KINDS))
    assert state.num_reads == num_passes


def test_plain_decoding_reads_nothing_until_the_end() -> None:
    state, num_passes = run(METHODS[0], PLAIN)
    assert state.num_reads == num_passes == 0


def test_meta_tensors_do_catch_a_read() -> None:
    with pytest.raises(RuntimeError):
        torch.empty(2, device=META).tolist()
    with pytest.raises(RuntimeError):
        bool(torch.empty(1, device=META).any())
    with pytest.raises(RuntimeError):
        torch.empty(3, device=META)[torch.empty(3, dtype=torch.bool, device=META)]
