"""From flags to a policy."""

from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deft_core.image_chain import ImageChain
from deft_core.types import ActOptions, Observation
from deft_policies.base import PolicyRequest
from deft_policies.benchmark.roofline import WeightBytes
from deft_policies.checkpoint.drafts import save_medusa
from deft_policies.checkpoint.tensor_file import digest_weights
from deft_policies.decoding.methods import presets
from deft_policies.errors import CheckpointError, DeviceError, PolicyError, RequestError
from deft_policies.families import family
from deft_policies.families.loading import examine, load_float32_twin, load_policy
from deft_policies.families.options import ModelOptions, add_flags, read_flags
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.draft_heads import MedusaHeads
from deft_policies.model.formats import Precision, Quantization
from tests import golden
from tests.tiny_openvla import tiny_model

OPTIONS = ModelOptions(
    checkpoint=str(golden.TINY_OPENVLA),
    device="cpu",
    precision=Precision.FLOAT32,
    decoding="autoregressive",
    num_threads=1,
)
RANDOM = replace(OPTIONS, checkpoint=None, random_weights=str(golden.TINY_OPENVLA))


def tokens_of(policy: VlaPolicy, decoding: str | None = None) -> tuple[int, ...]:
    case = golden.cases_with_image()[0]
    options = ActOptions(statistics_key=case.statistics_key, decoding=decoding)
    observation = Observation(case.image(), case.instruction)
    trace = policy.act([PolicyRequest(observation, options=options)])[0].chunk.trace
    assert trace is not None
    return trace.tokens


def parse(*arguments: str) -> ModelOptions:
    parser = ArgumentParser()
    add_flags(parser.add_argument_group())
    return read_flags(parser.parse_args(arguments))


def test_the_help_names_every_method() -> None:
    parser = ArgumentParser()
    add_flags(parser.add_argument_group())
    shown = " ".join(parser.format_help().split())
    assert f"one of {', '.join(presets())};" in shown.replace("- ", "-")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoding": "fastest"}, "fastest"),
        ({"decoding": "autoregressive", "radius": 3}, "radius"),
        ({"draft_heads": (Path("nowhere"),)}, "--draft-head nowhere"),
        ({"statistics_key": "kitchen"}, "kitchen"),
    ],
)
def test_wrong_options_are_refused_before_weights_are_loaded(
    changes: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("deft_policies.families.family.load_model", refuse)
    with pytest.raises(PolicyError, match=message):
        load_policy(replace(OPTIONS, **changes))  # type: ignore[arg-type]


def test_every_flag_reaches_the_options() -> None:
    options = parse(
        *("--checkpoint", "dir", "--adapter", "lora", "--statistics-key", "goal"),
        *("--device", "cpu", "--dtype", "bfloat16", "--quantization", "int8"),
        *("--image-chain", "libero", "--decoding", "deft", "--radius", "4"),
        *("--draft-head", "a", "--draft-head", "b"),
        *("--temperature", "0.5", "--seed", "3"),
        *("--no-graphs", "--no-fused-kernels", "--threads", "2"),
    )
    assert options == ModelOptions(
        checkpoint="dir",
        adapter="lora",
        statistics_key="goal",
        device="cpu",
        precision=Precision.BFLOAT16,
        quantization=Quantization.INT8,
        image_chain=ImageChain.LIBERO,
        decoding="deft",
        draft_heads=(Path("a"), Path("b")),
        radius=4,
        temperature=0.5,
        seed=3,
        has_graphs=False,
        fuses_kernels=False,
        num_threads=2,
    )
    assert parse() == ModelOptions()


@pytest.mark.parametrize(
    ("asked", "by_default", "is_fused"),
    [((), True, True), ((), False, False), ("--fused-kernels", False, True)]
    + [("--no-fused-kernels", True, False)],
)
def test_a_family_runs_fused_kernels_unless_a_flag_says_otherwise(
    asked: str | tuple[()], by_default: bool, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = pytest.importorskip("deft_policies.model.kernels.launch", reason="needs Triton")
    monkeypatch.setattr(launch, "add_whole_sums", lambda: None)
    monkeypatch.setattr(launch, "kernels_for", lambda _: launch.FusedKernels())
    options, model = parse(*((asked,) if asked else ())), tiny_model()
    family.fuse_kernels(model, options, torch.device("cuda"), by_default)
    assert (model.decoder.kernels is not None) == is_fused


@pytest.mark.parametrize("arguments", [("--radius", "-1"), ("--threads", "0"), ("--radius", "x")])
def test_numbers_that_make_no_sense_are_refused(
    arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert "whole number" in capsys.readouterr().err


def test_info_tells_what_was_loaded() -> None:
    info = load_policy(replace(OPTIONS, image_chain=ImageChain.LIBERO)).info
    assert info.image_chain == "libero"
    assert info.details["dtype"] == "float32"
    assert info.details["weights"] == str(golden.TINY_OPENVLA)
    assert info.details["device"].startswith("cpu")
    assert info.details["processor"]
    assert info.versions["torch"] == torch.__version__


def test_weights_and_heads_have_the_digests_of_their_files(tmp_path: Path) -> None:
    head = golden.write_draft_head(tmp_path / "eagle")
    expected = {
        "digest of weights": digest_weights([golden.TINY_OPENVLA]),
        "digest of head eagle": digest_weights([head]),
    }
    for precision in Precision:
        info = load_policy(replace(OPTIONS, draft_heads=(head,), precision=precision)).info
        assert expected.items() <= info.details.items()
    assert not any("digest" in name for name in load_policy(RANDOM).info.details)


def test_eagle_and_medusa_heads_draft_together(tmp_path: Path) -> None:
    case = golden.cases_with_image()[0]
    eagle = golden.write_draft_head(tmp_path / "eagle")
    save_medusa(MedusaHeads(64, 3), tmp_path / "medusa")
    policy = load_policy(replace(OPTIONS, draft_heads=(tmp_path / "medusa", eagle)))
    drafts = policy.drafts
    assert drafts.head is not None
    assert drafts.medusa is not None
    assert "spec-vla-strict" in policy.info.decoding_methods
    assert tokens_of(policy, "spec-vla-strict") == case.tokens
    without = load_policy(OPTIONS)
    with pytest.raises(RequestError, match="--draft-head"):
        without.check(
            Observation(case.image(), case.instruction),
            ActOptions(statistics_key=case.statistics_key, decoding="spec-vla"),
        )


def test_random_weights_repeat_themselves_by_seed_and_need_no_files() -> None:
    first = tokens_of(load_policy(RANDOM))
    assert tokens_of(load_policy(RANDOM)) == first
    assert tokens_of(load_policy(replace(RANDOM, seed=1))) != first
    small = load_policy(replace(RANDOM, random_weights="small"))
    observation = Observation(np.zeros((64, 64, 3), np.uint8), "lift the cup")
    chunk = small.act([PolicyRequest(observation)])[0].chunk
    assert np.isfinite(chunk.actions).all()


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.BFLOAT16])
@pytest.mark.parametrize("options", [OPTIONS, RANDOM])
def test_the_float32_twin_has_the_weights_of_the_other_format(
    options: ModelOptions, precision: Precision
) -> None:
    policy = load_policy(replace(options, precision=Precision.BFLOAT16))
    twin = load_float32_twin(replace(options, precision=precision))
    ours = dict(policy.model.network.named_parameters())
    for name, weight in twin.model.network.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight.bfloat16(), ours[name])


def test_int8_matrices_answer_and_say_so() -> None:
    policy = load_policy(replace(OPTIONS, quantization=Quantization.INT8))
    assert policy.info.details["quantization"] == "int8"
    assert WeightBytes.of(policy).decoder == 1.0
    case = golden.cases_with_image()[0]
    same = sum(a == b for a, b in zip(tokens_of(policy), case.tokens, strict=True))
    assert same >= 1
    alone = tokens_of(policy)
    assert tokens_of(policy, "lossless") == alone


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"checkpoint": None}, "--checkpoint"),
        ({"random_weights": "openvla-7b"}, "--checkpoint"),
        ({"checkpoint": None, "random_weights": "huge"}, "openvla-7b, small"),
        ({"checkpoint": "/nowhere"}, "/nowhere"),
    ],
)
def test_what_cannot_be_loaded_is_a_checkpoint_error(
    changes: dict[str, str | None], problem: str
) -> None:
    options = ModelOptions(
        checkpoint=changes.get("checkpoint", OPTIONS.checkpoint),
        random_weights=changes.get("random_weights"),
        device="cpu",
    )
    with pytest.raises(CheckpointError, match=problem):
        load_policy(options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_devices_that_are_not_there_are_device_errors() -> None:
    with pytest.raises(DeviceError, match="no CUDA"):
        load_policy(replace(OPTIONS, device="cuda"))
    with pytest.raises(DeviceError, match="unknown device 'toaster'"):
        load_policy(replace(OPTIONS, device="toaster"))
    with pytest.raises(DeviceError, match="cuda"):
        load_policy(replace(OPTIONS, device="meta"))


def test_matrices_that_a_format_cannot_take_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """int4 groups 32 numbers; rows of 688 are no multiple of that."""
    small = ModelOptions(random_weights="small", device="cpu", precision=Precision.FLOAT32)
    policy = load_policy(replace(small, quantization=Quantization.INT4))
    assert policy.info.details["quantization"] == "int4, but 12 of 48 matrices stay as they were"
    assert WeightBytes.of(policy).decoder == 1.0
    assert load_policy(small).info.details["quantization"] == "none"


def test_a_start_without_the_statistics_key_it_needs_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    load_policy(OPTIONS)
    assert "every request must name one of libero_spatial, bridge_orig" in caplog.text
    caplog.clear()
    load_policy(replace(OPTIONS, statistics_key="libero_spatial"))
    load_policy(ModelOptions(random_weights="small", device="cpu"))  # has one key
    assert not caplog.text


def test_small_models_take_one_thread_unless_told_otherwise() -> None:
    """Two threads on busy cores once took 1,400 ms where one took 57."""
    small = ModelOptions(random_weights="small", device="cpu", precision=Precision.FLOAT32)
    before = torch.get_num_threads()
    try:
        for told, expected in ((None, 1), (2, 2)):
            torch.set_num_threads(2)
            policy = load_policy(replace(small, num_threads=told))
            assert torch.get_num_threads() == expected
            assert policy.info.details["device"] == f"cpu ({expected} threads)"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("has_tiles", "served", "reason"),
    [
        (True, "bfloat16", "the default on a CPU with AMX"),
        (False, "float32", "the default on a CPU without AMX"),
    ],
)
def test_a_cpus_format_follows_from_what_its_processor_can_do(
    monkeypatch: pytest.MonkeyPatch, has_tiles: bool, served: str, reason: str
) -> None:
    """It was timed once, so that two replicas of one policy answered in two formats."""
    monkeypatch.setattr(family, "multiplies_tiles", lambda: has_tiles)
    options = replace(RANDOM, precision=None)
    for _ in range(3):
        details = load_policy(options).info.details
        assert (details["dtype"], details["dtype chosen"]) == (served, reason)
    device = examine(options)[0]
    assert device.subject == "device"
    assert f"{served} ({reason})" in device.text


@pytest.mark.parametrize(
    "options",
    [RANDOM, ModelOptions(random_weights="small", num_pictures=2, num_steps=8, device="cpu")],
    ids=["tokens", "one-pass"],
)
def test_the_log_says_which_format_is_served_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, options: ModelOptions
) -> None:
    monkeypatch.setattr(family, "multiplies_tiles", lambda: False)
    with caplog.at_level("INFO"):
        load_policy(replace(options, precision=None))
    assert "float32 (the default on a CPU without AMX)" in caplog.text


def test_weights_of_few_bits_are_multiplied_in_float32_on_any_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(family, "multiplies_tiles", lambda: True)
    options = replace(RANDOM, precision=None, quantization=Quantization.INT8)
    chosen = family.choose_precision(options, torch.device("cpu"))
    assert chosen == (Precision.FLOAT32, "the default of quantised weights on a CPU")


def test_info_says_who_asked_for_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "multiplies_tiles", lambda: True)
    options = replace(RANDOM, precision=None)
    asked = {
        "as asked for": replace(options, precision=Precision.FLOAT32),
        "as the policy's files ask": replace(options, usual_precision=Precision.FLOAT32),
    }
    for reason, one in asked.items():
        details = load_policy(one).info.details
        assert (details["dtype"], details["dtype chosen"]) == ("float32", reason)


def test_info_tells_how_far_exact_methods_answer_as_plain_decoding_does() -> None:
    options = replace(RANDOM, precision=None)
    told = {
        one: load_policy(replace(options, precision=one)).info.details["answers of exact methods"]
        for one in Precision
    }
    assert told[Precision.FLOAT32] == "as plain decoding's but for near ties"
    assert told[Precision.BFLOAT16].startswith("bit-equal to plain decoding's")
