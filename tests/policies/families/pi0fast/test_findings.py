"""`deft doctor` warns of what costs users their success without a word, and says what it costs."""

import json
import shutil
from pathlib import Path

import pytest

from deft_policies.base import Finding, Verdict
from deft_policies.families.loading import examine, open_model
from deft_policies.families.pi0fast.family import Pi0FastFamily
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


@pytest.mark.parametrize("settings", [{"time_horizon": 4, "action_dim": 7}, {"min_token": -3}])
def test_a_fast_tokenizer_of_other_chunks_is_a_doubt(
    settings: dict[str, int], folder: Path
) -> None:
    """LeRobot sets both sizes itself."""
    for key, value in settings.items():
        change(folder / "lerobot/fast-action-tokenizer/processor_config.json", key, value)
    answers = [one for one in examine(options_of(str(folder))) if one.subject == "answers"]
    assert [one.verdict for one in answers] == [Verdict.GOOD, Verdict.DOUBTFUL]


def test_max_tokens_cut_answers_without_the_grammar_alone() -> None:
    for grammar, most in (("on", 256), ("off", 9)):
        family = open_model(options_of("quantile", grammar=grammar, max_tokens=9))
        assert isinstance(family, Pi0FastFamily)
        assert family.longest_answer == most
