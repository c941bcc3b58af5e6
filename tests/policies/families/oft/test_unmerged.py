"""Fine-tunes whose LoRA was never merged: the folder that training writes has no model in it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deft_core.image_chain import ImageChain
from deft_core.types import ActOptions
from deft_policies.base import PolicyRequest
from deft_policies.checkpoint.open import load_model
from deft_policies.errors import CheckpointError
from deft_policies.families.loading import load_policy
from deft_policies.families.oft.model import Oft
from deft_policies.families.oft.policy import OftPolicy
from deft_policies.families.options import ModelOptions
from deft_policies.model.formats import Precision
from tests import golden, golden_oft
from tests.policies.checkpoint.checkpoint_files import edit_json, open_checkpoint
from tests.tiny_openvla import CPU

CASES = [
    case
    for case in golden_oft.cases()
    if case.variant.name == "discrete" and case.fields["center_crop"]
]
HEAD = "language_model.lm_head"


def write_run(folder: Path, base: str | Path = golden.TINY_OPENVLA, head: str = "") -> Path:
    """What training leaves: statistics, the adapter in a folder of its own, and perhaps a head."""
    source = golden_oft.OFT / "discrete"
    folder.mkdir()
    shutil.copytree(source / "lora_adapter", folder / "lora_adapter")
    shutil.copy(source / "dataset_statistics.json", folder)
    for path in (golden_oft.OFT / head).glob("*checkpoint.pt") if head else ():
        shutil.copy(path, folder)
    edit_json(
        folder / "lora_adapter/adapter_config.json",
        lambda content: content.update(base_model_name_or_path=str(base)),
    )
    return folder


def load(checkpoint: Path, adapter: Path | None = None) -> OftPolicy:
    return load_policy(
        ModelOptions(
            checkpoint=str(checkpoint),
            adapter=None if adapter is None else str(adapter),
            num_pictures=1,
            num_steps=8,
            precision=Precision.FLOAT32,
            device="cpu",
            image_chain=ImageChain.OFT,
        )
    )


def tokens_of(policy: OftPolicy) -> np.ndarray:
    found = []
    for case in CASES:
        options = ActOptions(statistics_key=case.statistics_key, want_trace=True)
        (answer,) = policy.act([PolicyRequest(case.observation(), options=options)])
        assert answer.chunk.trace is not None
        found.append(answer.chunk.trace.tokens)
    return np.array(found)


def test_what_is_merged_here_answers_as_what_the_original_merged(tmp_path: Path) -> None:
    """Rounded once instead of thrice, 15 of 336 tokens would be others."""
    run = write_run(tmp_path / "run")
    merged = load_file(golden_oft.OFT / "discrete/model_overlay.safetensors")
    found = load_model(open_checkpoint(str(run)), CPU, torch.float32).named_tensors()
    compared = [name for name in merged if name in found]
    assert {"patch_embed", "layers"} <= {part for name in compared for part in name.split(".")}
    wrong = sum(int((found[name] != merged[name].float()).sum()) for name in compared)
    assert wrong <= 1e-5 * sum(merged[name].numel() for name in compared)
    expected = np.array([np.ravel(case.fields["tokens"]) for case in CASES])
    np.testing.assert_array_equal(tokens_of(load(run)), expected)


def test_base_and_run_may_be_named_apart_and_the_head_is_the_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", base="elsewhere/base", head="l1_1img")
    for adapter in (run, run / "lora_adapter"):
        policy = load(golden.TINY_OPENVLA, adapter)
        assert isinstance(policy.model, Oft)
        assert policy.model.parts.head is not None
        assert CASES[0].statistics_key in policy.info.statistics_keys


def test_a_layer_that_is_saved_beside_its_factors_has_both(tmp_path: Path) -> None:
    """The original's adapters hold the language model's head and what is added to it."""
    run = write_run(tmp_path / "run")
    path = run / "lora_adapter/adapter_model.safetensors"
    base = load_file(golden.TINY_OPENVLA / "model.safetensors")[f"{HEAD}.weight"]
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(base.shape, generator=generator).bfloat16()
    down, up = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((32, base.shape[1]), (base.shape[0], 32))
    )
    names = ("base_layer", "lora_A", "lora_B")
    added = {
        f"base_model.model.{HEAD}.{name}.weight": one
        for name, one in zip(names, (whole, down, up), strict=True)
    }
    save_file(load_file(path) | added, path)
    model = load_model(open_checkpoint(str(run)), CPU, torch.bfloat16)
    found = model.named_tensors()[f"{HEAD}.weight"]
    change = (up.float() @ down.float()).bfloat16() * 0.5
    torch.testing.assert_close(found, whole + change)


def test_what_cannot_be_merged_is_refused_with_what_to_do(tmp_path: Path) -> None:
    lost = write_run(tmp_path / "lost", base="/no/such/base")
    with pytest.raises(CheckpointError, match="--checkpoint BASE --adapter .*lost"):
        load(lost)
    film = write_run(tmp_path / "film", head="film_2img_proprio")
    with pytest.raises(CheckpointError, match="merge it"):
        load(film)
    plain = ModelOptions(checkpoint=str(write_run(tmp_path / "plain")), device="cpu")
    with pytest.raises(CheckpointError, match="lora_adapter"):
        load_policy(plain)
