"""`deft doctor` warns of what costs users their success without a word, and says what it costs."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from deft_policies.base import Finding, Verdict
from deft_policies.families.loading import examine, open_model
from deft_policies.families.pi0fast.family import Pi0FastFamily
from deft_policies.families.pi0fast.findings import find_costs
from deft_policies.families.pi0fast.network import HEAD, TABLE, PaliGemma, Pi0FastConfig
from deft_policies.model.sizes import LlamaSizes, TowerConfig
from deft_policies.model.tensor_names import TensorPlace
from tests.golden_pi0fast import GOLDEN, VARIANTS, options_of


def found(name: str, folder: Path | None = None, **more: object) -> dict[str, Finding]:
    options = options_of(name if folder is None else str(folder), **more)
    return {one.subject: one for one in examine(options)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(GOLDEN / "quantile", tmp_path / "quantile"))


def change(path: Path, key: str, value: object) -> None:
    content = json.loads(path.read_text())
    content[key] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_checkpoint_is_recognised_by_its_files(name: str) -> None:
    family = open_model(options_of(name))
    assert isinstance(family, Pi0FastFamily)
    assert all(one.verdict is not Verdict.BAD for one in found(name).values())


def test_a_padded_prompt_is_suggested_where_an_old_version_has_saved_the_weights() -> None:
    assert found("quantile")["prompt"].verdict is Verdict.GOOD
    doubt = found("meanstd")["prompt"]
    assert doubt.verdict is Verdict.DOUBTFUL
    assert "--padded-state" in doubt.text
    padded = found("meanstd", pads_state=True)["prompt"]
    assert padded.verdict is Verdict.GOOD
    assert "32 numbers" in padded.text


def test_statistics_of_the_other_kind_are_named(folder: Path) -> None:
    assert found("quantile")["normalisation"].verdict is Verdict.GOOD
    mapping = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    change(folder / "config.json", "normalization_mapping", mapping)
    doubt = found("", folder)["normalisation"]
    assert doubt.verdict is Verdict.DOUBTFUL
    assert "MEAN_STD" in doubt.text
    assert "QUANTILES" in doubt.text


def test_fewer_executed_actions_are_told_apart_from_a_shorter_chunk(folder: Path) -> None:
    change(folder / "config.json", "n_action_steps", 5)
    assert "execute 5" in found("", folder)["answers"].text


def real_sizes(stored: tuple[str, ...], rows: tuple[int, ...]) -> Pi0FastConfig:
    llm = LlamaSizes(
        vocabulary=len(rows) or 257152,
        width=2048,
        mlp_width=16384,
        num_layers=18,
        num_heads=8,
        num_kv_heads=1,
        head_dim=256,
        gate="gelu_tanh",
    )
    tower = TowerConfig(False, "", 1152, 27, 16, 4304)
    return Pi0FastConfig(llm, tower, 257152, stored, rows, {})


@pytest.mark.parametrize(
    ("stored", "rows", "weights", "head"),
    [
        ((HEAD,), (), 2.923, 1.05),
        ((TABLE, HEAD), (), 3.450, 1.05),
        ((HEAD,), range(2052), 2.932, 0.01),
    ],
)
def test_the_arithmetic_of_the_real_sizes(
    stored: tuple[str, ...], rows: tuple[int, ...], weights: float, head: float
) -> None:
    """As counted by hand: 3.96 GB of layers a token in bfloat16, and 18.4 kB in the cache."""
    config = real_sizes(stored, tuple(rows))
    with torch.device("meta"):
        network = PaliGemma(config)
    kept = {name: tuple(one.shape) for name, one in network.named_parameters()}
    if not rows and len(stored) == 1:
        del kept["decoder.head.weight"]
    places = [TensorPlace(name, shape, name) for name, shape in kept.items()]
    text = find_costs(config, places, 2, torch.bfloat16).text
    assert f"{weights:.3f} billion" in text
    assert "3.96 GB of layers" in text
    assert f"{head:.2f} GB of the head" in text
    assert "18.4 kB" in text
    assert "572 rows computes 2.3 TFLOP" in text
