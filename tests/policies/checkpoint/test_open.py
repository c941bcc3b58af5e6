import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from deft_policies.checkpoint.config import load_config
from deft_policies.checkpoint.open import (
    check_memory,
    find_free_bytes,
    hub_bytes,
    is_hub_id,
    load_model,
    locate_checkpoint,
    weight_bytes,
)
from deft_policies.checkpoint.tensor_file import find_tensors
from deft_policies.errors import CheckpointError, DeviceError
from deft_policies.model.formats import Quantization
from deft_policies.model.tensor_names import tensor_places
from tests import golden
from tests.policies.checkpoint.checkpoint_files import (
    edit_json,
    link_golden,
    loaded_tensors,
    open_checkpoint,
    random_tensors,
    replace_file,
    slow_tensors,
    v01_config,
    write_large,
    write_tiny,
)
from tests.tiny_openvla import CPU, tiny_config
from tiny_libero_recipe.checkpoint_writer import write_checkpoint
from tiny_libero_recipe.tokenizer import build_tokenizer

GOLDEN_NAME = "language_model.model.layers.1.mlp.up_proj.weight"
SHARD_BYTES = 40_000


def error_of(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(open_checkpoint(str(directory)), CPU, torch.float32)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_of_the_golden_checkpoint_arrives(dtype: torch.dtype) -> None:
    expected = slow_tensors(golden.TINY_OPENVLA / "model.safetensors")
    loaded = loaded_tensors(golden.TINY_OPENVLA, dtype)
    assert all(torch.equal(tensor, expected[name].to(dtype)) for name, tensor in loaded.items())
    unused = set(expected) - set(loaded)
    assert unused
    assert all("vision_backbone" in name for name in unused)


def test_opening_reads_config_and_tokenizer_too() -> None:
    checkpoint = open_checkpoint(str(golden.TINY_OPENVLA))
    case = golden.cases()[1]
    assert checkpoint.encoder.encode(case.instruction) == case.prompt_ids
    assert case.statistics_key in checkpoint.config.statistics


def test_unused_tensors_may_be_left_out(tmp_path: Path) -> None:
    config = tiny_config()
    used = {place.name for place in tensor_places(config) if place.parameter is not None}
    tensors = {name: one for name, one in random_tensors(config).items() if name in used}
    write_checkpoint(tmp_path / "lean", config, tensors, build_tokenizer(["go"]))
    assert set(loaded_tensors(tmp_path / "lean")) == used


def test_derived_buffers_of_older_savers_are_skipped(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    buffer = "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**tensors, buffer: torch.ones(4)}, path)
    assert loaded_tensors(tmp_path / "model")


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "whole")
    write_tiny(tmp_path / "shards", max_shard_bytes=SHARD_BYTES)
    shards = list((tmp_path / "shards").glob("model-*.safetensors"))
    assert len(shards) > 2
    loaded = loaded_tensors(tmp_path / "shards")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in loaded.items())


def test_the_first_release_loads(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", v01_config())
    checkpoint = open_checkpoint(str(tmp_path / "model"))
    model = load_model(checkpoint, CPU, torch.float32)
    assert not checkpoint.config.is_fused
    assert model.projector.fc3 is None
    patches = model.see(torch.zeros(1, 3, 28, 28))
    assert patches.shape == (1, 4, 32)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", max_shard_bytes=SHARD_BYTES)
    shard = sorted((tmp_path / "model").glob("model-*.safetensors"))[1]
    shard.unlink()
    message = error_of(tmp_path / "model")
    assert f"{shard} is missing" in message
    assert "download that shard" in message


def test_an_index_of_absent_tensors_names_them(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", max_shard_bytes=SHARD_BYTES)
    index = tmp_path / "model" / "model.safetensors.index.json"
    edit_json(
        index,
        lambda content: content["weight_map"].update(
            ghost=sorted(path.name for path in index.parent.glob("model-*"))[0]
        ),
    )  # type: ignore[attr-defined]
    message = error_of(tmp_path / "model")
    assert f"{index} lists tensors that are in no shard: ghost" in message


@pytest.mark.parametrize("kept", [0, 5, 300, 20_000])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    write_tiny(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    message = error_of(tmp_path / "model")
    assert f"{path} is truncated" in message
    assert message.endswith("download it again")


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    assert f"{path} is truncated" in error_of(tmp_path / "model")


def test_a_wrong_shape_is_told_with_both_shapes(tmp_path: Path) -> None:
    directory = link_golden(tmp_path / "model")
    tensors = slow_tensors(golden.TINY_OPENVLA / "model.safetensors")
    tensors[GOLDEN_NAME] = torch.zeros(171, 64)
    (directory / "model.safetensors").unlink()
    save_file(tensors, directory / "model.safetensors")
    message = error_of(directory)
    assert f"1 of the wrong shape: {GOLDEN_NAME} 171x64 instead of 172x64" in message
    assert str(directory) in message


def test_missing_and_unexpected_tensors_are_listed(tmp_path: Path) -> None:
    directory = link_golden(tmp_path / "model")
    tensors = slow_tensors(golden.TINY_OPENVLA / "model.safetensors")
    tensors["action_head.weight"] = tensors.pop(GOLDEN_NAME)
    (directory / "model.safetensors").unlink()
    save_file(tensors, directory / "model.safetensors")
    message = error_of(directory)
    assert f"1 missing: {GOLDEN_NAME}" in message
    assert "1 unexpected: action_head.weight" in message


def test_long_lists_of_names_are_cut(tmp_path: Path) -> None:
    directory = link_golden(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    save_file({"weight": torch.zeros(1)}, directory / "model.safetensors")
    message = error_of(directory)
    assert len(message) < 1500
    assert "more; 1 unexpected: weight" in message


def test_a_checkpoint_without_statistics_is_refused(tmp_path: Path) -> None:
    directory = link_golden(tmp_path / "model")
    (directory / "dataset_statistics.json").unlink()
    edit_json(directory / "config.json", lambda content: content.pop("norm_stats"))
    message = error_of(directory)
    assert f"{directory / 'config.json'} has no norm_stats" in message
    assert "dataset_statistics.json" in message


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    directory = link_golden(tmp_path / "model")
    edit_json(directory / "config.json", lambda content: content.update(model_type="llava"))
    message = error_of(directory)
    assert f"{directory / 'config.json'}: model_type is 'llava'" in message


def test_a_tokenizer_is_required(tmp_path: Path) -> None:
    directory = link_golden(tmp_path / "model")
    (directory / "tokenizer.json").unlink()
    assert f"{directory / 'tokenizer.json'} is missing; copy" in error_of(directory)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    directory = link_golden(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    trap = tmp_path / "sprung"
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(trap))
    message = error_of(directory)
    assert "pytorch_model.bin is a pickle" in message
    assert "convert" in message


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    directory = link_golden(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    assert "model.safetensors" in error_of(directory)


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    assert "the directory that holds" in error_of(path)


def test_a_path_that_does_not_exist_says_so(tmp_path: Path) -> None:
    assert f"no directory {tmp_path / 'nothing'}" in error_of(tmp_path / "nothing")


def test_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(hub_id: str) -> Path:
        asked.append(hub_id)
        return tmp_path

    monkeypatch.setattr("deft_policies.checkpoint.open.download_snapshot", download)
    source = locate_checkpoint("openvla/openvla-v01-7b")
    assert (asked, source.directory) == (["openvla/openvla-v01-7b"], tmp_path)
    assert source.name == "openvla/openvla-v01-7b"


def test_a_hub_id_offline_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    message = error_of(Path("openvla/openvla-7b"))
    assert message.startswith("openvla/openvla-7b")
    assert "local copy" in message


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("openvla/openvla-7b", True),
        ("/models/nonexistent", False),
        ("./models/one", False),
        ("../models", False),
        ("~/models", False),
        ("models", False),
        ("a/b/c", False),
    ],
)
def test_a_path_is_told_from_a_hub_id(name: str, is_one: bool) -> None:
    assert is_hub_id(name) is is_one


def test_what_lies_here_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "one").mkdir(parents=True)
    assert not is_hub_id("models/one")


class Hub:
    """Knows one model, with a file that nobody needs."""

    def model_info(self, name: str, files_metadata: bool, timeout: float) -> SimpleNamespace:
        assert files_metadata
        if name != "lab/arm":
            raise OSError("404 Client Error")
        files = {"a.safetensors": 3 * 2**30, "config.json": 700, "film.mp4": 2**40}
        return SimpleNamespace(
            siblings=[SimpleNamespace(rfilename=one, size=size) for one, size in files.items()]
        )


def test_of_a_hub_id_it_is_said_whether_it_is_there_and_how_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HfApi", Hub)
    assert hub_bytes("lab/arm") == 3 * 2**30 + 700
    with pytest.raises(CheckpointError, match=r"lab/leg .*\(404 Client Error\)"):
        hub_bytes("lab/leg")


def test_too_little_memory_is_told_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    config, free = load_config(golden.TINY_OPENVLA), 1 << 40
    monkeypatch.setattr("deft_policies.checkpoint.open.find_free_bytes", lambda device: free)
    asked = tensor_places(config), CPU, torch.float32, Quantization.NONE
    need = check_memory(*asked)
    free = sum(need.values())
    assert check_memory(*asked) == need
    free = 10_000_000
    with pytest.raises(DeviceError, match=r"0\.3 GiB .* of weights"):
        check_memory(*asked)


def test_what_passes_set_aside_is_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a larger batch takes more."""
    config, free = load_config(golden.TINY_OPENVLA), 1 << 40
    monkeypatch.setattr("deft_policies.checkpoint.open.find_free_bytes", lambda device: free)
    asked = tensor_places(config), CPU, torch.float32, Quantization.NONE
    need = check_memory(*asked, {"keys and values": 3 << 30})
    assert need["keys and values"] == 3 << 30
    free = 2 << 30
    with pytest.raises(DeviceError, match=r"3\.0 of keys and values.*smaller --largest-batch"):
        check_memory(*asked, {"keys and values": 3 << 30})


def test_the_memory_estimate_counts_what_is_loaded() -> None:
    config = load_config(golden.TINY_OPENVLA)
    model = load_model(open_checkpoint(str(golden.TINY_OPENVLA)), CPU, torch.bfloat16)
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert weight_bytes(tensor_places(config), CPU, torch.bfloat16) == held
    assert weight_bytes(tensor_places(config), CPU, torch.float32) == 2 * held
    halved = weight_bytes(tensor_places(config), CPU, torch.bfloat16, Quantization.INT8)
    assert held / 2 < halved < held


def test_free_memory_of_this_machine_is_known_where_linux_tells() -> None:
    free = find_free_bytes(CPU)
    assert free is None or free > 0
    assert find_free_bytes(torch.device("meta")) is None


def test_tensors_stay_whole_when_their_file_is_opened_for_each(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.full((1024, 1024), float(number)) for number in range(12)}
    save_file(tensors, tmp_path / "model.safetensors")
    kept = {name: one.read() for name, one in find_tensors(tmp_path).items()}
    assert all(torch.equal(kept[name], tensor) for name, tensor in tensors.items())


def test_loading_holds_the_checkpoint_in_memory_once(tmp_path: Path) -> None:
    """At most 1.15 times its size, measured as the peak of a process of its own."""
    write_large(tmp_path / "model", mebibytes=200)
    command = [sys.executable, "-m", "tests.policies.checkpoint.peak_of_loading"]
    done = subprocess.run(
        [*command, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    ratio = float(done.stdout)
    assert 0.9 < ratio < 1.15


def test_replacing_a_linked_file_leaves_the_golden_one_alone(tmp_path: Path) -> None:
    """The helper that damages copies must never damage the originals."""
    directory = link_golden(tmp_path / "model")
    replace_file(directory / "config.json", b"{}")
    assert (golden.TINY_OPENVLA / "config.json").stat().st_size > 2
    shutil.rmtree(directory)
    assert (golden.TINY_OPENVLA / "tokenizer.json").exists()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_weight_that_is_not_finite_is_refused_by_name(
    tmp_path: Path, bad: float, dtype: torch.dtype
) -> None:
    """One NaN among the weights moved the arm almost fully in every dimension."""
    link_golden(tmp_path / "c")
    tensors = load_file(golden.TINY_OPENVLA / "model.safetensors")
    tensors[GOLDEN_NAME] = tensors[GOLDEN_NAME].clone()
    tensors[GOLDEN_NAME][3, 5] = bad
    file = tmp_path / "c" / "model.safetensors"
    file.unlink()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"{GOLDEN_NAME}.*NaN"):
        load_model(open_checkpoint(str(tmp_path / "c")), CPU, dtype)
