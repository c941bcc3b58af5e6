"""The host reads from the device once a pass, and once for each model that drafts; no more.

Shown without a GPU: decoding runs on meta tensors, which have shapes but no values. Whatever would
make the host wait for a value (tolist, item, bool, indexing by a mask) fails on them, so what runs
through cannot do so. The reads there are, are answered by a script and counted.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from deft_policies.decoding import engine as engine_module
from deft_policies.decoding import kinds
from deft_policies.decoding.acceptance.rule import ActionSpace, DeviceRule, TreeRule
from deft_policies.decoding.drafts import heads
from deft_policies.decoding.drafts.growth import Grown
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import Plan, TreeShape
from deft_policies.decoding.planner import DraftModels
from deft_policies.decoding.read import Reading
from deft_policies.decoding.sequence import AnswerSpec, PassResult
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import Prompt, Scores, Target
from deft_policies.decoding.tree import Branches, DraftTree
from deft_policies.memory import SessionMemory
from deft_policies.model.draft_heads import EagleHead, MedusaHeads, head_sizes
from deft_policies.model.llama import LlamaDecoder
from tests.policies.decoding.scripts import METHODS, clock
from tests.tiny_target import ACTIONS, LENGTH, NUM_PATCHES, WIDTH, tiny_decoder

META = torch.device("meta")
FORM = AnswerSpec.action(ActionSpace.in_bins(LENGTH))
ON_DEVICE = (kinds.HEAD, kinds.MEDUSA)  # models that run on the device; each reads its tree
ON_HOST = (kinds.PREVIOUS, kinds.EXTRAPOLATION, "ngram", kinds.RECYCLED)
SHAPES = (
    TreeShape(5, 4, 20),
    TreeShape(5, 4, 20, is_full_depth=True),
    TreeShape.template(levels=5, reach=3),
)


class ScriptedReading(Reading):
    """Says of every answer that the target wants token 40, and that the rule turns all down."""

    num_reads = 0

    def __init__(
        self, sequences: Sequence[Answer], trees: Sequence[DraftTree], scores: Scores
    ) -> None:
        assert scores.logits.device == META
        super().__init__(sequences, trees, scores)
        self._what = list(zip(sequences, trees, strict=True))

    def finish(self) -> list[PassResult]:
        type(self).num_reads += 1
        return [self._found(sequence, tree) for sequence, tree in self._what]

    def _found(self, sequence: Answer, tree: DraftTree) -> PassResult:
        wanted = [40] * tree.num_nodes
        asks = isinstance(sequence.method.rule, (DeviceRule, TreeRule))
        judged = [0.0] * tree.num_nodes * (asks and tree.has_guesses)
        chosen = (tree.root, 40) if tree.odds is not None else None
        return PassResult(sequence.number, wanted, wanted, True, [], judged, chosen)


def meta_target() -> Target:
    with torch.device(META):
        decoder = LlamaDecoder(tiny_decoder().sizes)
    return Target(decoder.requires_grad_(False), ACTIONS)


def meta_models() -> DraftModels:
    with torch.device(META):
        head = EagleHead(head_sizes(WIDTH, 24, 2, 2, max_positions=128)).requires_grad_(False)
        medusa = MedusaHeads(WIDTH, 6).requires_grad_(False)
    return DraftModels(head=head, medusa=medusa)


def reads_and_passes(
    method: Method, monkeypatch: pytest.MonkeyPatch, spec: AnswerSpec = FORM
) -> tuple[int, int, int]:
    """Decode two answers on meta tensors: reads of passes, reads of drafts, and passes."""
    drafted = []

    def read_drafts(grown: Grown, num_rows: int) -> list[Branches]:
        drafted.append(num_rows)
        tokens, parents, is_real, log_probs, odds = grown
        assert {one.device for one in (tokens, parents, is_real, log_probs)} == {META}
        ratio = None if odds is None else odds[0, :1].expand(2, -1)
        return [Branches([41, 42], [0, 0], [-1.0, -2.0], ratio) for _ in range(num_rows)]

    monkeypatch.setattr(ScriptedReading, "num_reads", 0)
    monkeypatch.setattr(engine_module, "Reading", ScriptedReading)
    monkeypatch.setattr(heads, "read_grown", read_drafts)
    own = tuple((ACTIONS.last - step,) * LENGTH for step in range(3))  # nothing near them
    memory = SessionMemory(own=own, drift=(0.0,) * LENGTH, answer=(7,) * 20)
    rows = [Answer(method, spec, memory) for _ in range(2)]
    engine = Engine(meta_target(), meta_models())
    prompt = torch.empty(12, WIDTH, device=META)
    prompts = [Prompt(prompt, 1, slice(1, 1 + NUM_PATCHES)) for _ in rows]
    with torch.inference_mode():
        engine.decode(prompts, rows, clock())
    return ScriptedReading.num_reads, len(drafted), max(row.num_passes for row in rows)


def planned(plan: Plan) -> Method:
    return replace(METHODS[1], plans=(plan,), is_guarded=False)


def runs_here(method: Method) -> bool:
    """Whether its sources keep to the device or the host: the others ask a model step by step."""
    return set(method.plans[0].kinds) <= {*ON_DEVICE, *ON_HOST}


CASES = [one for one in METHODS if runs_here(one)]


@pytest.mark.parametrize("method", CASES, ids=[method.name for method in CASES])
def test_no_rule_reads_anything(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    method = replace(method, is_guarded=False)
    num_reads, num_drafted, num_passes = reads_and_passes(method, monkeypatch)
    assert num_reads == num_passes > 1
    models = sum(kind in ON_DEVICE for kind in method.plans[0].rounds)
    assert num_drafted <= models * num_passes


@pytest.mark.parametrize("kind", ON_DEVICE)
@pytest.mark.parametrize("shape", SHAPES, ids=["dynamic", "fixed", "template"])
def test_a_model_reads_its_tree_and_nothing_else(
    kind: str, shape: TreeShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan("case", (kind, kinds.PREVIOUS), (kind,), shape)
    num_reads, num_drafted, num_passes = reads_and_passes(planned(plan), monkeypatch)
    assert num_reads == num_passes > 1
    assert num_drafted in (num_passes - 2, num_passes - 1)  # for both answers together


def test_what_drafts_from_memory_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("all", ON_HOST, ON_HOST)
    num_reads, num_drafted, num_passes = reads_and_passes(planned(plan), monkeypatch)
    assert (num_reads, num_drafted) == (num_passes, 0)


def test_a_text_drafted_from_the_last_one_reads_once_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = AnswerSpec(24, stop=5)
    plan = Plan("text", (kinds.PREVIOUS_ANSWER,), (kinds.PREVIOUS_ANSWER,))
    num_reads, num_drafted, num_passes = reads_and_passes(planned(plan), monkeypatch, text)
    assert (num_reads, num_drafted) == (num_passes, 0)
    assert num_passes > 2


def test_meta_tensors_do_catch_a_read() -> None:
    with pytest.raises(RuntimeError):
        torch.empty(2, device=META).tolist()
    with pytest.raises(RuntimeError):
        bool(torch.empty(1, device=META).any())
    with pytest.raises(RuntimeError):
        torch.empty(3, device=META)[torch.empty(3, dtype=torch.bool, device=META)]
