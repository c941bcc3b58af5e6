"""`deft bench` of an OFT fine-tune: one pass over pictures, prompt and chunk, and its limits."""

import json
from pathlib import Path

import pytest
from torch import nn

from deft_policies.benchmark.replay import Contender, ReplayFrame, generate_frames
from deft_policies.benchmark.roofline import (
    Cost,
    DeviceRates,
    WeightBytes,
    decoder_cost,
    module_cost,
    pass_costs,
    pictures_cost,
    vision_cost,
)
from deft_policies.families.loading import load_policy
from deft_policies.families.oft.model import Oft
from deft_policies.families.oft.policy import OftPolicy
from deft_policies.families.options import ModelOptions
from deft_policies.model.formats import Precision
from deft_policies.model.random_weights import openvla_7b
from deft_server.__main__ import main as deft
from tests import golden_oft

BF16 = WeightBytes(2.0, 2.0)
RATES = DeviceRates(4.3e12, 790e12, "an H200")


@pytest.fixture(scope="module", params=["l1_2img_proprio", "discrete", "film_2img_proprio"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OftPolicy:
    variant = golden_oft.variants()[request.param]
    return load_policy(
        ModelOptions(
            checkpoint=str(variant.write(tmp_path_factory.mktemp("oft") / "checkpoint")),
            num_pictures=variant.num_pictures,
            num_steps=variant.chunk,
            precision=Precision.FLOAT32,
            device="cpu",
        )
    )


def test_limits_of_a_7b_pass_on_an_h200_follow_from_arithmetic() -> None:
    """Two pictures, a state, 33 ids and 56 values: 603 positions, bound by what is computed."""
    llm = openvla_7b().llm
    one = decoder_cost(llm, 1, BF16, 0, 603, 0, 0)
    assert one.num_flops == pytest.approx(2 * 6.476e9 * 603 + 32 * 4 * 4096 * 603**2, rel=0.01)
    assert one.floor_ms(RATES) == pytest.approx(10.1, rel=0.02)


def test_a_module_is_read_once_and_multiplied_for_every_input() -> None:
    module = nn.Linear(3, 4)
    assert module_cost(module, 5, WeightBytes(1.0, 2.0)) == Cost(2.0 * 16, 2.0 * 16 * 5)
    assert module_cost(None, 5, BF16) == Cost(0.0, 0.0)


def test_a_pass_is_as_long_as_the_sequence_that_the_model_runs(policy: OftPolicy) -> None:
    assert isinstance(policy.model, Oft)
    model = policy.model
    frame = ReplayFrame(policy.model.complete(generate_frames(1)[0].observation), "episode")
    prompt = policy.model.encode(frame.observation.instruction)
    length = model.num_before + model.lay_out([prompt]).ids.shape[1]
    has_head = model.parts.head is not None
    read = (0, 0) if has_head else (56, model.network.config.llm.vocabulary)
    weights = WeightBytes(4.0, 4.0)
    decoder = decoder_cost(model.network.config.llm, 2, weights, 0, length, *read)
    extra = module_cost(model.parts.state, 2, weights) + module_cost(
        model.parts.head, 2 * 8, weights
    )
    assert pass_costs(policy, frame, None, Contender("two", policy, batch_size=2)) == [
        decoder + extra
    ]


def test_towers_see_every_picture_of_every_robot(policy: OftPolicy) -> None:
    assert isinstance(policy.model, Oft)
    model = policy.model
    weights = WeightBytes(4.0, 4.0)
    pictures = 3 * model.parts.num_pictures
    seen = vision_cost(model.network.config, pictures, weights)
    film = module_cost(model.parts.film, 3, weights)
    assert pictures_cost(policy, 3) == seen + film
    assert (film.num_bytes > 0) == (model.parts.film is not None)


def test_bench_completes_its_frames_and_prints_the_limits_of_one_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "bench.json"
    directory = golden_oft.variants()["l1_2img_proprio"].write(tmp_path / "checkpoint")
    arguments = ["--checkpoint", str(directory), "--pictures", "2", "--chunk", "8"]
    sizes = ["--frames", "3", "--warm-ups", "1", "--threads", "1", "--dtype", "float32"]
    assert (
        deft(["bench", *arguments, *sizes, "--batch", "1,2", "--stages", "--json", str(target)])
        == 0
    )
    assert "% of limit" in capsys.readouterr().out
    report = json.loads(target.read_text())
    assert [speed["name"] for speed in report["speeds"]] == ["oft", "oft x2"]
    assert [speed["chunk_length"] for speed in report["speeds"]] == [8, 8]
    for roofline in report["rooflines"]:
        assert list(roofline["stages"]) == ["vision", "prefill"]  # no pass comes after them
        assert all(stage["floor_ms"] > 0 for stage in roofline["stages"].values())
    for wrong in (["--audit"], ["--decoding", "lossless"]):
        assert deft(["bench", *arguments, *sizes, *wrong]) != 0
        assert f"{wrong[0]}" in capsys.readouterr().err
