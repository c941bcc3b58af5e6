import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deft_policies.checkpoint.lora import LoraAdapter
from deft_policies.checkpoint.open import load_model
from deft_policies.errors import CheckpointError
from tests import golden
from tests.policies.checkpoint.checkpoint_files import edit_json, open_checkpoint
from tests.tiny_openvla import CPU, golden_model

ADAPTERS = golden.GOLDEN / "lora"
Q_PROJ = "language_model.model.layers.0.self_attn.q_proj"


def copy_adapter(directory: Path, case: str = "plain") -> Path:
    shutil.copytree(ADAPTERS / case, directory)
    (directory / "merged.safetensors").unlink()
    return directory


def change_factors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace or drop tensors of an adapter's file, by the end of their names."""
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    for ending, value in changes.items():
        name = f"base_model.model.{Q_PROJ}.{ending}.weight"
        tensors.pop(name)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path)


def error_of(adapter: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(golden.TINY_OPENVLA), str(adapter))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", ["plain", "patterns"])
def test_merged_weights_equal_pefts(case: str) -> None:
    model = load_model(open_checkpoint(str(ADAPTERS / case)), CPU, torch.float32)
    loaded, plain = model.named_tensors(), golden_model().named_tensors()
    merged = load_file(ADAPTERS / case / "merged.safetensors")
    assert merged
    for name, expected in merged.items():
        assert torch.allclose(loaded[name], expected, atol=1e-6, rtol=0)
        assert not torch.allclose(loaded[name], plain[name], atol=1e-3)


def test_weights_without_a_change_stay_as_they_are() -> None:
    checkpoint = open_checkpoint(str(ADAPTERS / "plain"))
    changed = LoraAdapter(ADAPTERS / "plain").targets
    loaded = load_model(checkpoint, CPU, torch.float32).named_tensors()
    for name, tensor in golden_model().named_tensors().items():
        assert torch.equal(loaded[name], tensor) is (name not in changed)


def test_merging_rounds_only_once() -> None:
    exact = load_model(open_checkpoint(str(ADAPTERS / "plain")), CPU, torch.float32)
    rounded = load_model(open_checkpoint(str(ADAPTERS / "plain")), CPU, torch.bfloat16)
    weight = exact.named_tensors()[f"{Q_PROJ}.weight"]
    assert torch.equal(rounded.named_tensors()[f"{Q_PROJ}.weight"], weight.bfloat16())


def test_an_adapter_can_be_named_beside_its_base(tmp_path: Path) -> None:
    adapter = copy_adapter(tmp_path / "adapter")
    edit_json(
        adapter / "adapter_config.json",
        lambda content: content.update(base_model_name_or_path="openvla/openvla-7b"),
    )
    checkpoint = open_checkpoint(str(golden.TINY_OPENVLA), str(adapter))
    assert checkpoint.source.directory == golden.TINY_OPENVLA
    assert checkpoint.merge is not None


def test_statistics_and_tokenizer_of_the_adapter_come_first(tmp_path: Path) -> None:
    adapter = copy_adapter(tmp_path / "adapter")
    (adapter / "dataset_statistics.json").write_text(
        '{"my_robot": {"action": {"q01": [0.0], "q99": [1.0]}}}'
    )
    checkpoint = open_checkpoint(str(golden.TINY_OPENVLA), str(adapter))
    assert list(checkpoint.config.statistics) == ["my_robot"]
    case = golden.cases()[1]
    assert checkpoint.encoder.encode(case.instruction) == case.prompt_ids
    (adapter / "tokenizer.json").write_text("{")
    assert str(adapter / "tokenizer.json") in error_of(adapter)


def test_modules_that_were_trained_whole_replace_the_base(tmp_path: Path) -> None:
    adapter = copy_adapter(tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    head = torch.randn(32064, 64)
    save_file({**load_file(path), "base_model.model.language_model.lm_head.weight": head}, path)
    checkpoint = open_checkpoint(str(golden.TINY_OPENVLA), str(adapter))
    loaded = load_model(checkpoint, CPU, torch.float32).named_tensors()
    assert torch.equal(loaded["language_model.lm_head.weight"], head)


def test_factors_saved_under_an_adapters_name_are_found(tmp_path: Path) -> None:
    adapter = copy_adapter(tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    save_file(
        {n.replace(".weight", ".default.weight"): t for n, t in load_file(path).items()}, path
    )
    assert LoraAdapter(adapter).targets == LoraAdapter(ADAPTERS / "plain").targets


def test_an_adapter_without_a_base_says_what_to_write(tmp_path: Path) -> None:
    adapter = copy_adapter(tmp_path / "adapter")
    edit_json(
        adapter / "adapter_config.json",
        lambda content: content.update(base_model_name_or_path=None),
    )
    with pytest.raises(CheckpointError, match="names no base_model_name_or_path"):
        open_checkpoint(str(adapter))


def test_an_adapter_of_another_model_names_what_is_missing(tmp_path: Path) -> None:
    adapter = copy_adapter(tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    save_file({n.replace("layers.1", "layers.9"): t for n, t in load_file(path).items()}, path)
    message = error_of(adapter)
    assert "does not have: language_model.model.layers.9" in message
    assert str(path) in message


def test_factors_of_another_size_are_refused(tmp_path: Path) -> None:
    adapter = copy_adapter(tmp_path / "adapter")
    change_factors(adapter, lora_A=torch.zeros(4, 63))
    assert f"shape than the base's weights: {Q_PROJ}" in error_of(adapter)


def test_a_factor_without_its_partner_is_refused(tmp_path: Path) -> None:
    adapter = copy_adapter(tmp_path / "adapter")
    change_factors(adapter, lora_B=None)
    assert f"factors for {Q_PROJ}" in error_of(adapter)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is true"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is true"),
        ({"bias": "all"}, "bias is not none"),
        ({"r": None}, "r is missing"),
        ({"r": 0}, "r is 0 for"),
        ({"r": -4, "use_rslora": True}, "r is -4 for"),
        ({"rank_pattern": {"(a": 2}}, "rank_pattern.(a is no regular expression"),
        ({"rank_pattern": {"(a+)+b": 2}}, "rank_pattern.(a+)+b repeats a group"),
        ({"rank_pattern": {".*.*.*.*x": 2}}, "rank_pattern..*.*.*.*x repeats a group, or has"),
    ],
)
def test_adapters_of_other_kinds_are_refused(
    tmp_path: Path, change: dict[str, object], problem: str
) -> None:
    adapter = copy_adapter(tmp_path / "adapter")
    edit_json(adapter / "adapter_config.json", lambda content: content.update(change))
    assert f"{adapter / 'adapter_config.json'}: {problem}" in error_of(adapter)


def test_json_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    adapter = copy_adapter(tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text("[" * 100_000)
    assert "adapter_config.json is not JSON" in error_of(adapter)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_adapter_file_is_named(tmp_path: Path, name: str) -> None:
    adapter = copy_adapter(tmp_path / "adapter")
    (adapter / name).unlink()
    assert f"{adapter / name} is missing" in error_of(adapter)
