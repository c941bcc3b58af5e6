"""What is read of a policy's files, and that all else is refused with a sentence."""

import json
import os
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deft_policies.checkpoint.fields import JsonFields
from deft_policies.checkpoint.tensor_file import digest_weights, find_tensors, read_header
from deft_policies.errors import CheckpointError
from deft_policies.families.loading import open_model
from deft_policies.families.nora.model_folder import read_folder
from deft_policies.families.options import ModelOptions
from deft_policies.families.qwenfast.model import encode_prompt
from deft_policies.families.qwenfast.run_folder import find_runs, read_run
from deft_policies.model.statistics import ActionStatistics
from tests.golden_qwenfast import GOLDEN, variant

MOST_MEMORY = 2**26  # that refusing a file may take
LIBERO, BRIDGE = (Path(variant(name)["checkpoint"]) for name in ("libero", "bridge"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """StarVLA's root, with a run in it."""
    shutil.copytree(GOLDEN / BRIDGE.parts[0], tmp_path / "tree")
    return tmp_path / "tree"


@pytest.fixture
def run(tree: Path) -> Path:
    return tree.joinpath(*BRIDGE.parts[1:])


@pytest.fixture
def nora(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "nora", tmp_path / "nora")
    return tmp_path / "nora"


def edit_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_run_says_cameras_prompt_and_horizon() -> None:
    libero, bridge = read_run(GOLDEN / LIBERO), read_run(GOLDEN / BRIDGE)
    assert (libero.num_steps, libero.action_dim, libero.num_cameras) == (8, 7, 2)
    assert (bridge.num_steps, bridge.action_dim, bridge.num_cameras) == (16, 7, 1)
    assert libero.template == "{instruction}"
    assert bridge.template.startswith("Your task is {instruction}. ")
    assert libero.settings.repetition_penalty == 1.05
    assert [*libero.stop_ids()] == variant("libero")["end_ids"]
    assert libero.code_ids()[0] == variant("libero")["first_action_id"]


@pytest.mark.parametrize(
    ("written", "horizon"),
    [
        ("action_horizon: 4", 4),
        ("future_action_window_size: 4", 5),
        ("future_action_window_size: 0", 1),
        ("action_horizon: 4\n    future_action_window_size: 9", 4),
        ("past_action_window_size: 0", 16),
    ],
)
def test_the_horizon_has_two_names(run: Path, written: str, horizon: int) -> None:
    edit_text(run / "config.yaml", "action_horizon: 16", written)
    assert read_run(run).num_steps == horizon


def test_the_gripper_is_cut_or_kept_by_the_mixture() -> None:
    statistics = ActionStatistics(np.zeros(3), np.full(3, 2.0), np.array([True, True, False]))
    normalised = np.array([[-1.0, 0.5, 0.25], [1.5, 0.0, 0.75]])
    libero, bridge = read_run(GOLDEN / LIBERO), read_run(GOLDEN / BRIDGE)
    kept = libero.unnormalise(normalised, statistics)
    assert kept.tolist() == [[0.0, 1.5, 0.25], [2.5, 1.0, 0.75]]
    assert bridge.unnormalise(normalised, statistics)[:, 2].tolist() == [0.0, 1.0]
    assert libero.statistics["franka"].low[0] != bridge.statistics["oxe_bridge"].low[0]
    stored = json.loads((GOLDEN / LIBERO / "dataset_statistics.json").read_text())
    assert libero.statistics["franka"].low.tolist() == stored["franka"]["action"]["min"]
    stored = json.loads((GOLDEN / BRIDGE / "dataset_statistics.json").read_text())
    assert bridge.statistics["oxe_bridge"].low.tolist() == stored["oxe_bridge"]["action"]["q01"]


def test_weights_are_the_final_ones_or_those_of_most_steps(run: Path) -> None:
    steps = run / "checkpoints/steps_10000_model.safetensors"
    shutil.copy(steps, run / "checkpoints/steps_9000_model.safetensors")
    files = read_run(run)
    assert [one.name for one in files.weight_files] == ["steps_10000_model.safetensors"]
    assert any("of 2 steps' weights" in one for one in files.doubts)
    (run / "final_model").mkdir()
    (run / "final_model/pytorch_model.pt").write_bytes(
        (GOLDEN / LIBERO / "checkpoints/steps_30000_pytorch_model.pt").read_bytes()
    )
    assert [one.name for one in read_run(run).weight_files] == ["pytorch_model.pt"]


def test_a_run_of_several_is_named(tree: Path) -> None:
    runs = tree / "results/Checkpoints"
    shutil.copytree(runs / BRIDGE.name, runs / "second")
    with pytest.raises(CheckpointError, match="name one run's folder"):
        read_run(tree)
    assert find_runs(runs / "second") == [runs / "second"]
    assert find_runs(GOLDEN / "nora") == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("data_mix: bridge_rt_1", "data_mix: mine", "how its actions were normalised"),
        ("action_horizon: 16", "action_horizon: 1000000000", "action_horizon"),
        ("action_dim: 7", "action_dim: 6", "has 7 numbers for an action"),
        ("action_dim: 7", "action_dim: [7]", "action_dim"),
        ("Qwen2.5-VL-3B-Instruct-Action", "Other", "base_vlm names"),
    ],
)
def test_other_runs_are_refused(
    run: Path, old: str, new: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    edit_text(run / "config.yaml", old, new)
    with pytest.raises(CheckpointError, match=problem):
        open_model(ModelOptions(checkpoint=str(run), family="qwenfast"))


def test_tokens_that_the_base_does_not_have_are_missed(tree: Path) -> None:
    (tokenizer,) = tree.glob("playground/Pretrained_models/Qwen*/tokenizer.json")
    edit_text(tokenizer, "<robot_action_7>", "<robot_action_x7>")
    with pytest.raises(CheckpointError, match="447 of the 448 tokens"):
        open_model(ModelOptions(checkpoint=str(tree)))


def test_a_fast_tokenizer_of_other_chunks_is_doubted(tree: Path) -> None:
    assert read_run(tree).doubts == ()
    path = tree / "playground/Pretrained_models/fast/processor_config.json"
    edit(path, lambda config: config.update(time_horizon=5, min_token=-39))
    first, second = read_run(tree).doubts
    assert "is for 5 x None numbers, and answers have 16 x 7" in first
    assert "begins at the coefficient -39, and a chunk at its lowest has -40" in second


def test_a_head_that_is_not_the_table_is_refused(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    name = "steps_30000_pytorch_model.pt"
    weights = torch.load(GOLDEN / LIBERO / "checkpoints" / name, weights_only=True)
    (head,) = (one for one in weights if one.endswith("lm_head.weight"))
    weights[head] = weights[head] + 1
    torch.save(weights, run / "checkpoints" / name)
    family = open_model(ModelOptions(checkpoint=str(run)))
    with pytest.raises(CheckpointError, match="a head of its own"):
        family.load(torch.device("cpu"), torch.float32)


def test_nora_needs_no_statistics_file_on_libero(nora: Path) -> None:
    (nora / "norm_stats.json").unlink()
    files = read_folder(nora, None)
    assert {*files.statistics} >= {"libero_object", "libero_10", "libero_spatial", "libero_goal"}
    assert any("LIBERO's statistics" in one for one in files.doubts)
    known = files.statistics["libero_object"]
    assert known.low[0] == float(np.float32(-0.5383928418))
    assert files.statistics["libero_spatial"].low[0] == -0.7454732114076613
    closes, opens = files.unnormalise(np.array([[0.0] * 7, [0.0] * 6 + [1.0]]), known)[:, 6]
    assert (closes, opens) == (0.5, 1.0)


def test_nora_answers_with_as_many_actions_as_is_said(nora: Path) -> None:
    assert (read_folder(nora, None).num_steps, read_folder(nora, 5).num_steps) == (1, 5)
    edit(nora / "fast/processor_config.json", lambda config: config.update(time_horizon=5))
    assert read_folder(nora, None).num_steps == 5
    assert any("answers have 4 x 7" in one for one in read_folder(nora, 4).doubts)


def test_without_a_fast_folder_the_published_one_is_asked_for(
    nora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.rmtree(nora / "fast")
    with pytest.raises(CheckpointError, match="physical-intelligence/fast"):
        read_folder(nora, None)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"repetition_penalty": 0}, "more than 0"),
        ({"repetition_penalty": "x"}, "repetition_penalty"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"eos_token_id": [10**9]}, "the weights have 899 words"),
        ({"max_new_tokens": 10**12}, "max_new_tokens"),
    ],
)
def test_other_generation_settings_are_refused(
    nora: Path, change: dict[str, object], problem: str
) -> None:
    edit(nora / "generation_config.json", lambda content: content.update(change))
    with pytest.raises(CheckpointError, match=problem):
        open_model(ModelOptions(checkpoint=str(nora)))


def refuse(folder: Path, problem: str, family: str | None = "nora") -> None:
    """Opening it says what is wrong, and takes little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=problem):
            open_model(ModelOptions(checkpoint=str(folder), family=family))
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["norm_stats.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{" * 2**15, b"7", b"\xff"])
def test_broken_files_are_refused_and_cost_little(nora: Path, name: str, content: bytes) -> None:
    (nora / name).write_bytes(content)
    refuse(nora, "is missing|json|holds")


@pytest.mark.parametrize("name", ["norm_stats.json", "fast/tokenizer.json", "tokenizer.json"])
def test_a_file_of_a_terabyte_is_not_read(nora: Path, name: str) -> None:
    os.truncate(nora / name, 2**40)
    refuse(nora, "more than the")
    refuse(nora, "more than the|expected 'openvla'", family=None)


def test_a_tokenizer_makes_no_prompt_longer_than_it_is(nora: Path) -> None:
    prompt = encode_prompt(read_folder(nora, None), "left")
    padding = {
        "strategy": {"Fixed": 10**7},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    edit(nora / "tokenizer.json", lambda content: content.update(padding=padding))
    assert encode_prompt(read_folder(nora, None), "left") == prompt
    doubling = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
    grown = {"type": "Sequence", "normalizers": [doubling] * 40}
    edit(nora / "tokenizer.json", lambda content: content.update(normalizer=grown))
    refuse(nora, "normalizer.type is 'Sequence', expected 'NFC'")
    grown = {"type": "Sequence", "decoders": [doubling] * 40}
    edit(nora / "tokenizer.json", lambda content: content.update(normalizer=None, decoder=grown))
    refuse(nora, "decoder.type is 'Sequence', expected 'ByteLevel'")


@pytest.mark.parametrize(
    "change",
    [
        {"q01": [0.0] * 6},
        {"q01": [1e400] * 7},
        {"q01": [5.0] * 7},
        {"q01": "x"},
        {"q01": [None] * 7},
    ],
)
def test_statistics_that_mean_nothing_are_refused(nora: Path, change: dict[str, Any]) -> None:
    edit(
        nora / "norm_stats.json",
        lambda content: content["bridge_orig"]["action"].update(change),
    )
    refuse(nora, "norm_stats.json")


@pytest.mark.parametrize(
    "header",
    [
        b"\xff" * 8,
        (2**40).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"{}",
        (400).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}}'.ljust(400),
    ],
)
def test_other_headers_of_weights_are_refused(nora: Path, header: bytes) -> None:
    (nora / "model.safetensors").write_bytes(header + bytes(8))
    refuse(nora, "truncated or damaged|do not fit|no table of words")


def save_pickle(path: Path, content: object) -> None:
    torch.save(content, path)


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch /tmp/never-run",)


def test_a_pickle_of_weights_is_mapped_and_nothing_of_it_is_run(tmp_path: Path) -> None:
    path = tmp_path / "steps_1_pytorch_model.pt"
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_pickle(path, weights)
    stored = read_header(path)
    assert {name: one.shape for name, one in stored.items()} == {"a": (2, 3), "b": (4,)}
    assert all(torch.equal(stored[name].read(), one) for name, one in weights.items())
    for content in (
        {"a": Evil()},
        [torch.ones(1)],
        {"a": 7},
        {"a": {"b": torch.ones(1)}},
        {"a": torch.ones(1, dtype=torch.int64)},
        {"a": torch.ones(1, device="meta")},
        {"a": torch.eye(3).to_sparse()},
    ):
        save_pickle(path, content)
        with pytest.raises(CheckpointError, match="steps_1_pytorch_model.pt"):
            read_header(path)
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="torch 1.6"):
        read_header(path)


def test_a_packed_pickle_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.pt"
    save_pickle(path, {"a": torch.ones(3)})
    with zipfile.ZipFile(path) as file:
        entries = {one: file.read(one) for one in file.namelist()}
    for name in entries:
        if name.endswith("data.pkl"):
            entries[name] += bytes(2**27)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries.items():
            file.writestr(name, content)
    with pytest.raises(CheckpointError, match="is packed"):
        read_header(path)


def test_a_digest_may_name_files(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    both, one = digest_weights([tmp_path]), digest_weights([tmp_path / "a.safetensors"])
    (tmp_path / "b.safetensors").write_bytes(b"other")
    assert digest_weights([tmp_path]) != both
    assert digest_weights([tmp_path / "a.safetensors"]) == one


def test_yaml_is_read_as_json_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a: &x [1, 2]\nb: *x\n")
    assert JsonFields.load_yaml(path, "").values("b", int) == (1, 2)
    laughs = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
    )
    for text, problem in (
        (laughs, "more than 100000 values"),
        ("a: &a [*a]\n", "more than 100000 values"),
        ("a: !!python/object/apply:os.system [ls]\n", "cannot be read"),
        ("- 1\n", "expected an object"),
        ("a: 2020-01-01\n", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=problem):
            JsonFields.load_yaml(path, "")


def test_shards_and_single_files_are_found_alike() -> None:
    names = {*find_tensors(GOLDEN / "nora_long")}
    assert "model.language_model.embed_tokens.weight" in names
