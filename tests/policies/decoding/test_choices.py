"""From the command line to a decoder: which flags choose which sources, for which method."""

from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deft_core.types import ActOptions, Observation
from deft_policies.base import PolicyRequest
from deft_policies.decoding import kinds
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.plan import KeyMask, RopeOffset, TreeShape
from deft_policies.errors import CheckpointError, RequestError
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions, add_flags, read_flags
from deft_policies.families.policy import VlaPolicy
from deft_policies.memory import SessionMemory
from deft_policies.methods.within_bins import WithinBins
from tests import golden

PREVIOUS = (kinds.PREVIOUS, kinds.RECYCLED)
GOLDEN = ModelOptions(
    checkpoint=str(golden.TINY_OPENVLA), statistics_key="libero_spatial", device="cpu"
)


def parsed(*flags: str) -> ModelOptions:
    parser = ArgumentParser()
    add_flags(parser.add_argument_group())
    return read_flags(parser.parse_args(flags))


def test_flags_name_sources_and_the_conventions_of_a_head() -> None:
    options = parsed(
        "--drafts=previous,head,previous",
        "--draft-rope=published",
        "--draft-key-mask=prefix-only",
        "--self-draft-layers=2",
        "--draft-model=elsewhere",
        "--no-guard",
    )
    assert options.drafts == (kinds.PREVIOUS, kinds.HEAD)
    assert options.rope_offset is RopeOffset.PUBLISHED
    assert options.key_mask is KeyMask.PREFIX_ONLY
    assert (options.self_draft_layers, options.draft_model) == (2, "elsewhere")
    assert not options.is_guarded


def test_without_flags_everything_is_as_the_preset_says() -> None:
    options = parsed()
    assert options.drafts is None
    assert options.rope_offset is RopeOffset.CORRECT
    assert options.key_mask is KeyMask.CAUSAL
    assert options.is_guarded


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--drafts=previous,oracle", "unknown source 'oracle'; known: head, previous"),
        ("--self-draft-layers=0", "at least 1, got '0'"),
        ("--draft-rope=wrong", "invalid choice"),
    ],
)
def test_a_bad_flag_says_what_it_takes(
    flag: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(flag)
    assert message in capsys.readouterr().err


def method_asked_for(policy: VlaPolicy, options: ActOptions) -> str:
    """Everything of the trace that the method alone decides."""
    image = np.zeros((32, 32, 3), dtype=np.uint8)
    traces = []
    memory = SessionMemory()
    for _ in range(2):
        request = PolicyRequest(Observation(image, "lift it"), memory, options)
        (answer,) = policy.act([request])
        memory, trace = answer.memory, answer.chunk.trace
        assert trace is not None
        traces.append(trace)
    named = {name for one in traces[1].passes for name in one.sources if name}
    return f"{traces[1].method} by {traces[1].rule} from {sorted(named)}, {traces[1].guard!r}"


def test_a_request_for_another_method_gets_that_method_as_published() -> None:
    policy = load_policy(replace(GOLDEN, drafts=PREVIOUS, is_guarded=False))
    default = method_asked_for(policy, ActOptions())
    assert default == "lossless by ExactMatch() from ['previous'], ''"
    assert method_asked_for(policy, ActOptions(decoding="lossless")) == default
    relaxed = method_asked_for(policy, ActOptions(decoding="within-bins", radius=3))
    assert relaxed == "within-bins by WithinBins(radius=3) from ['previous'], ''"


def test_a_request_may_change_the_radius_of_the_default_alone() -> None:
    policy = load_policy(replace(GOLDEN, decoding="within-bins", radius=5, drafts=PREVIOUS))
    assert "WithinBins(radius=5)" in method_asked_for(policy, ActOptions())
    assert "WithinBins(radius=2)" in method_asked_for(policy, ActOptions(radius=2))


def test_what_is_changed_about_a_method_leaves_the_method_as_it_was() -> None:
    before = find_method("within-bins")
    after = before.with_radius(3).with_drafts(PREVIOUS).with_shape(TreeShape.chain(2))
    assert after.rule == WithinBins(3)
    assert [plan.rounds for plan in after.plans] == [PREVIOUS]
    assert [plan.shape for plan in after.plans] == [TreeShape.chain(2)]
    assert find_method("within-bins") == before != after


def test_plans_that_other_trees_make_alike_are_one() -> None:
    plans = find_method("lossless").with_shape(TreeShape.chain(2)).plans
    assert len({(plan.prefill, plan.rounds) for plan in plans}) == len(plans)
    assert {plan.shape for plan in plans} == {TreeShape.chain(2)}


def test_sources_for_a_method_that_drafts_nothing_are_refused() -> None:
    with pytest.raises(RequestError, match="'autoregressive' drafts nothing"):
        load_policy(replace(GOLDEN, decoding="autoregressive", drafts=PREVIOUS))


def test_a_shape_changes_nothing_where_nothing_is_drafted() -> None:
    policy = load_policy(replace(GOLDEN, decoding="autoregressive", draft_tree=TreeShape.chain(2)))
    assert method_asked_for(policy, ActOptions()) == "autoregressive by  from [], ''"


def test_every_source_is_loaded_by_its_flag(tmp_path: Path) -> None:
    directory = golden.write_draft_head(tmp_path / "head")
    options = replace(
        GOLDEN,
        draft_heads=(directory,),
        self_draft_layers=1,
        drafts=(kinds.HEAD, kinds.SMALL_MODEL, kinds.PREVIOUS),
    )
    drafts = load_policy(options).drafts
    assert drafts.head is not None
    assert drafts.small_model is not None


def test_a_self_draft_deeper_than_the_decoder_is_refused() -> None:
    with pytest.raises(CheckpointError, match="2 layers, cannot draft with its first 9"):
        load_policy(replace(GOLDEN, self_draft_layers=9))
