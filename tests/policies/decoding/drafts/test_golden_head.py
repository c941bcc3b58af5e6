"""The draft head, its trees and whole decoding runs against what the published code computed."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from deft_core.types import DecodeTrace
from deft_policies.checkpoint.drafts import load_head
from deft_policies.decoding import kinds
from deft_policies.decoding.drafts.heads import EagleDrafts
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.plan import Plan, RopeOffset, TreeShape
from deft_policies.decoding.planner import DraftModels
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import Prompt, ancestors_of
from deft_policies.decoding.trace import PassRecord
from deft_policies.decoding.tree import DraftTree, merge
from deft_policies.families.openvla import VlaTarget
from deft_policies.memory import SessionMemory
from deft_policies.methods.spec_vla import WithinIds
from deft_policies.model.draft_heads import EagleHead
from deft_policies.model.image import build_normalization_table, resize_like_processor
from tests import golden
from tests.policies.decoding.scripts import Decoding, Session, answer_of
from tests.policies.decoding.trees import OnBins
from tests.tiny_openvla import golden_model

FULL_TREE = TreeShape(levels=5, top_k=8, num_guesses=49, is_full_depth=True)
ROPE = {"multimodal": RopeOffset.CORRECT, "reference": RopeOffset.PUBLISHED}
# Cases whose runs differ between the variants; the canonical variants are run on all of them.
TELLING_CASES = (0, 3, 5, 8, 10)
PATCHES = slice(1, 257)


@lru_cache(maxsize=1)
def target() -> VlaTarget:
    return VlaTarget(golden_model())


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> EagleHead:
    directory = golden.write_draft_head(tmp_path_factory.mktemp("golden") / "head")
    return load_head(directory, 64, torch.zeros(1))


@lru_cache(maxsize=16)
def prompt_of_case(number: int) -> Prompt:
    case = golden.cases()[number]
    if not case.has_image:
        name = f"patch_embeddings_{number:02d}"
        patches = torch.from_numpy(golden.arrays()[name])[None]
        ids = torch.tensor([case.prompt_ids])
        embeds = golden_model().compose(patches, ids)[0]
        return Prompt(embeds, case.prompt_ids[-1], PATCHES)
    config = golden_model().config.image
    fitted = torch.from_numpy(resize_like_processor(case.image(), config)).permute(2, 0, 1).long()
    table = torch.from_numpy(build_normalization_table(config))
    pixels = torch.stack([table[channel][fitted[channel % 3]] for channel in range(len(table))])
    return target().read(pixels[None], [case.prompt_ids])[0]


def usable_cases() -> list[int]:
    return [case.number for case in golden.cases() if case.has_image or case.number == 0]


@pytest.mark.parametrize("round_name", [f"c{case:02d}_r{r}" for case in range(3) for r in (1, 2)])
def test_teacher_forced_hidden_states_equal_the_fixture(head: EagleHead, round_name: str) -> None:
    arrays = golden.draft_arrays()
    embeds = torch.from_numpy(arrays[f"{round_name}_in_embeds"])[None]
    hidden = torch.from_numpy(arrays[f"{round_name}_in_hidden"])[None]
    expected = torch.from_numpy(arrays[f"{round_name}_prefix_hidden"])
    torch.testing.assert_close(head(embeds, hidden)[0], expected, atol=1e-4, rtol=0.0)


def prompt_of(case: int) -> tuple[Prompt, torch.Tensor, Answer]:
    """The prefill of a fixture case without guesses: prompt, hidden states, and the answer."""
    arrays, name = golden.draft_arrays(), f"c{case:02d}_r1"
    hidden = torch.from_numpy(arrays[f"{name}_in_hidden"])
    embeds = torch.from_numpy(arrays[f"{name}_in_embeds"])
    # The fixture holds e_{t+1}; e_0 is never read.
    prompt = torch.cat((torch.zeros_like(embeds[:1]), embeds[:-1]))
    answer = answer_of(SessionMemory())
    answer.slot, answer.shape = 0, FULL_TREE
    return Prompt(prompt, 0, PATCHES), hidden, answer


def pass_by(drafts: EagleDrafts, answer: Answer, hidden: torch.Tensor, tokens: list[int]) -> None:
    """Let a pass commit these tokens, the last of them the bonus."""
    tree = merge([0], [("test", [tokens[:-1]])], 99)
    answer.tokens = [*answer.tokens, *tokens]
    answer.last = PassRecord(False, tree, tokens, list(range(len(tokens))), 0, [])
    drafts.observe(answer, hidden, torch.zeros(len(tokens), 1))


def second_round(drafts: EagleDrafts, answer: Answer, case: int) -> None:
    """After one commit of round 1 with r = 9, as the fixture's README says."""
    canonical = next(
        one for one in golden.draft_expected()["variants"] if one["canonical"] and one["r"] == 9
    )
    first = canonical["cases"][case]["rounds"][0]
    committed = [*first["accepted"], first["bonus"]]
    hidden = torch.from_numpy(golden.draft_arrays()[f"c{case:02d}_r2_in_hidden"])
    pass_by(drafts, answer, hidden[-len(committed) :], committed)


def drafted(drafts: EagleDrafts, answer: Answer) -> DraftTree:
    found = drafts.draft_all([answer])[0]
    return merge(answer.tokens[-1:], [("head", found)], 64)


@pytest.mark.parametrize(
    "entry", golden.draft_expected()["trees"], ids=lambda entry: str(entry["name"])
)
def test_trees_and_cumulative_scores_equal_the_fixture(
    head: EagleHead, entry: dict[str, Any]
) -> None:
    arrays, name = golden.draft_arrays(), entry["name"]
    drafts = EagleDrafts(head, target(), ROPE[entry["rope"]])
    prompt, hidden, answer = prompt_of(entry["case"])
    is_full = entry["draft_vocab"] == "full"
    answer.method = replace(find_method("spec-vla"), whole_vocabulary=is_full)
    drafts.observe_prompt(answer, prompt, hidden)
    first = next(
        one["root"]
        for one in golden.draft_expected()["trees"]
        if one["name"][:6] == name[:4] + "r1"
    )
    pass_by(drafts, answer, hidden[-1:], [first])
    tree = drafted(drafts, answer)
    if entry["round"] == 2:
        second_round(drafts, answer, entry["case"])
        tree = drafted(drafts, answer)
    assert tree.tokens[0] == entry["root"]
    assert tree.tokens[1:] == arrays[f"{name}_tokens"].tolist()
    assert tree.parents[1:] == arrays[f"{name}_parents"].tolist()
    assert tree.depths()[1:] == arrays[f"{name}_depth"].tolist()
    assert ancestors_of(tree).tolist() == arrays[f"{name}_mask"].tolist()
    assert tree.log_probs[1:] == pytest.approx(arrays[f"{name}_logp"].tolist(), abs=1e-3)


def method_of(variant: dict[str, Any]) -> Method:
    """Any variant of the fixture, spelt as a method."""
    radius = variant["r"]
    is_full = variant["tree"] == "full"
    shape = FULL_TREE if is_full else TreeShape(5, 8, 49)
    rule = WithinIds if variant["accept"] == "raw_ids" else OnBins
    return Method(
        name="golden",
        rule=rule(radius, ties="first-row" if variant["tie"] == "first_row" else "closest"),
        plans=(Plan("golden", (), (kinds.HEAD,), shape),),
        whole_vocabulary=variant["draft_vocab"] == "full",
    )


def decode(method: Method, head: EagleHead, rope: str, number: int) -> DecodeTrace:
    models = DraftModels(head=head, rope_offset=ROPE[rope])
    return Decoding(target(), method, models).decode([prompt_of_case(number)], Session.of(1))[0]


def variant_name(variant: dict[str, Any]) -> str:
    keys = ("rope", "draft_vocab", "tree", "tie", "r", "accept")
    return "-".join(str(variant[key]) for key in keys)


@pytest.mark.parametrize("variant", golden.draft_expected()["variants"], ids=variant_name)
def test_runs_accept_and_answer_as_recorded(head: EagleHead, variant: dict[str, Any]) -> None:
    method = method_of(variant)
    expected = {case["case"]: case for case in variant["cases"]}
    for number in usable_cases() if variant["canonical"] else TELLING_CASES:
        trace = decode(method, head, variant["rope"], number)
        assert list(trace.tokens) == expected[number]["tokens"]
        assert list(trace.accepted_lengths[1:]) == expected[number]["accepted_lengths"]


@pytest.mark.parametrize(("name", "radius"), [("spec-vla", 9), ("spec-vla-strict", 0)])
def test_the_spec_vla_presets_are_the_canonical_loop_tree_by_tree(
    head: EagleHead, name: str, radius: int
) -> None:
    canonical = next(
        one
        for one in golden.draft_expected()["variants"]
        if one["canonical"] and one["r"] == radius
    )
    method = find_method(name)
    for number in usable_cases()[:6]:
        trace = decode(method, head, "multimodal", number)
        rounds = canonical["cases"][number]["rounds"]
        assert len(trace.passes) == len(rounds) + 1
        for found, expected in zip(trace.passes[1:], rounds, strict=True):
            assert found.tokens[0] == expected["root"]
            assert list(found.tokens[1:]) == expected["tree_tokens"]
            assert list(found.parents[1:]) == expected["tree_parents"]
            accepted = [found.tokens[node] for node in found.path]
            assert accepted == expected["accepted"]
            assert found.bonus == expected["bonus"]


@pytest.mark.promise
def test_strict_runs_equal_plain_decoding(head: EagleHead) -> None:
    for number in usable_cases()[:4]:
        trace = decode(find_method("spec-vla-strict"), head, "multimodal", number)
        assert trace.tokens == golden.cases()[number].tokens
