"""What a GPU is asked for beside the weights, before any are read: on sizes alone."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from deft_policies.checkpoint.open import check_memory
from deft_policies.decoding.captured import Shape, shapes_of
from deft_policies.decoding.target import Target
from deft_policies.errors import DeviceError
from deft_policies.families.openvla import OpenVLAFamily
from deft_policies.families.options import ModelOptions
from deft_policies.model.formats import Precision, Quantization
from deft_policies.model.graphs import Reserve, StepRunner
from tests.fake_graphs import RecordingCapturer
from tests.tiny_target import ACTIONS, tiny_decoder

GIB = 2**30
HEAD = (Path("head"),)  # nobody opens it here


def family(**changes: object) -> OpenVLAFamily:
    options = ModelOptions(random_weights="openvla-7b", **changes)  # type: ignore[arg-type]
    return OpenVLAFamily(None, options)


def passes_of(found: OpenVLAFamily) -> list[Shape]:
    return shapes_of(found.reserve, found.widest, bool(found.options.draft_heads))


def planned(found: OpenVLAFamily) -> Mapping[str, int]:
    return found.planned_bytes(torch.bfloat16)


@pytest.mark.parametrize("draft_heads", [(), HEAD], ids=["no head", "head"])
def test_a_7b_captures_at_most_40_passes_in_at_most_3_gib(draft_heads: tuple[Path, ...]) -> None:
    found = family(draft_heads=draft_heads)
    assert found.reserve.rows == ModelOptions().largest_batch
    assert 0 < len(passes_of(found)) <= 40
    assert 0 < sum(planned(found).values()) <= 3.2 * GIB


@pytest.mark.parametrize(
    ("card", "quantization", "rows"),
    [(24, Quantization.NONE, 1), (24, Quantization.FP8, 4), (12, Quantization.INT4, 8)],
)
def test_a_card_holds_a_7b_in_a_format_and_one_of_8_gb_does_not(
    monkeypatch: pytest.MonkeyPatch, card: int, quantization: Quantization, rows: int
) -> None:
    """What `deft doctor` adds up; a gigabyte of the card is the driver's and torch's."""
    free = (card - 1) * GIB
    monkeypatch.setattr("deft_policies.checkpoint.open.find_free_bytes", lambda device: free)
    found = family(largest_batch=rows, quantization=quantization)
    asked = found.places, torch.device("cuda"), torch.bfloat16, quantization
    need = check_memory(*asked, planned(found))
    assert {"weights", *planned(found)} < need.keys()
    free = 7 * GIB
    with pytest.raises(DeviceError, match="a smaller --largest-batch, or a larger device"):
        check_memory(*asked, planned(found))


def test_more_rows_take_more_memory_and_hardly_more_passes() -> None:
    few, many = family(largest_batch=1), family(largest_batch=16)
    assert sum(planned(many).values()) > 2 * sum(planned(few).values())
    assert len(passes_of(many)) <= len(passes_of(few)) + 4 * 4  # widths, for twice as many rows


def test_an_answer_takes_twice_the_memory_in_a_wider_format() -> None:
    found = family(precision=Precision.FLOAT32)
    narrow, wide = planned(found), found.planned_bytes(torch.float32)
    assert wide["keys and values"] == 2 * narrow["keys and values"]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("widest", [64, 128])
def test_what_is_planned_is_what_is_set_aside(rows: int, widest: int) -> None:
    runner = StepRunner(RecordingCapturer().capture, Reserve(rows, 5, 20))
    target = Target(tiny_decoder(), ACTIONS, runner=runner)
    cache = target.new_cache()
    passes = target.set_aside(cache, widest, num_tokens=8)
    assert passes is not None
    found = passes.layout.bytes_of(target.decoder.sizes, 4, num_graphs=1)
    assert found["keys and values"] == cache.data.nbytes
    scores = (passes.logits, passes.hidden, passes.best, passes.for_host)
    taken = sum(one.nbytes for one in scores) + 2 * passes.prompt.nbytes  # a prompt's inputs, too
    assert taken <= found["scores"] <= 1.5 * taken
