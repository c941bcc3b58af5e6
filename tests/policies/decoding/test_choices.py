"""From the command line to a decoder: which flags choose which sources, for which method."""

from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest

from deft_client.types import ActOptions
from deft_policies.decoding.plan import DraftKind, KeyMask, RopeOffset
from deft_policies.errors import CheckpointError
from deft_policies.openvla.decoders import DecodingChoice
from deft_policies.openvla.load import load_policy
from deft_policies.openvla.options import OpenVLAOptions, add_flags, read_flags
from tests import golden

PREVIOUS = (DraftKind.PREVIOUS, DraftKind.RECYCLED)
GOLDEN = OpenVLAOptions(
    checkpoint=str(golden.TINY_OPENVLA), statistics_key="libero_spatial", device="cpu"
)


def parsed(*flags: str) -> OpenVLAOptions:
    parser = ArgumentParser()
    add_flags(parser.add_argument_group())
    return read_flags(parser.parse_args(flags))


def test_flags_name_sources_and_the_conventions_of_a_head() -> None:
    options = parsed(
        "--drafts=previous,head,previous",
        "--draft-rope=published",
        "--draft-key-mask=prefix-only",
        "--self-draft-layers=2",
        "--self-draft-patches=0.1",
        "--no-guard",
    )
    assert options.drafts == (DraftKind.PREVIOUS, DraftKind.HEAD)
    assert options.rope_offset is RopeOffset.PUBLISHED
    assert options.key_mask is KeyMask.PREFIX_ONLY
    assert (options.self_draft_layers, options.self_draft_patches) == (2, 0.1)
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
        ("--self-draft-patches=0", "a share above 0 and up to 1, got '0'"),
        ("--self-draft-patches=all", "a share above 0 and up to 1, got 'all'"),
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


def test_a_request_for_another_method_gets_that_method_as_published() -> None:
    choice = DecodingChoice("lossless", None, PREVIOUS, is_guarded=False)
    assert choice.overridden(ActOptions()) == choice
    assert choice.overridden(ActOptions(decoding="lossless")) == choice
    relaxed = choice.overridden(ActOptions(decoding="within-bins", radius=3))
    assert relaxed == DecodingChoice("within-bins", 3, None, is_guarded=False)


def test_a_request_may_change_the_radius_of_the_default_alone() -> None:
    choice = DecodingChoice("within-bins", 5, PREVIOUS)
    assert choice.overridden(ActOptions(radius=2)) == replace(choice, radius=2)


def test_every_source_is_loaded_by_its_flag(tmp_path: Path) -> None:
    directory = golden.write_draft_head(tmp_path / "head")
    options = replace(
        GOLDEN,
        draft_heads=(directory,),
        self_draft_layers=1,
        self_draft_patches=0.5,
        drafts=(DraftKind.HEAD, DraftKind.SMALL_MODEL, DraftKind.PREVIOUS),
    )
    drafts = load_policy(options).parts.drafts
    assert drafts.head is not None
    assert drafts.small_model is not None
    assert drafts.patch_share == 0.5


def test_a_self_draft_deeper_than_the_decoder_is_refused() -> None:
    with pytest.raises(CheckpointError, match="2 layers, cannot draft with its first 9"):
        load_policy(replace(GOLDEN, self_draft_layers=9))
