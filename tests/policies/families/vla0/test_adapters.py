"""LoRA adapters of VLA-0: merged at loading, they answer as transformers does with them beside."""

import json
import shutil
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deft_core.types import Observation
from deft_policies.base import PolicyRequest
from deft_policies.benchmark.transformers_loops import QwenLoop, QwenPolicy, build_qwen
from deft_policies.decoding.clock import StageClock
from deft_policies.errors import CheckpointError
from deft_policies.families.loading import load_policy, open_model
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.families.vla0.model import RepetitionPenalty, Vla0
from deft_policies.model.formats import Precision
from tests.golden_vla0 import GOLDEN, cameras, variant

RANK, ALPHA = 8, 16
WIDTH, SHARED = 64, 32  # of queries, and of values
NAMES = {"old": "model.layers", "new": "model.language_model.layers"}


def factors(side: str, projection: str, layer: int) -> Tensor:
    out = WIDTH if projection == "q_proj" else SHARED
    shape = (RANK, WIDTH) if side == "A" else (out, RANK)
    generator = torch.Generator().manual_seed(1000 * layer + 10 * ord(projection[0]) + ord(side))
    return 0.1 * torch.randn(shape, generator=generator)


def write_run(directory: Path, names: str, base: str = "../../base") -> Path:
    """A run as VLA-0 leaves it with `use_lora`: an adapter and the processor's files."""
    model = directory / "run/model_last"
    shutil.copytree(GOLDEN / "tied", directory / "run")
    shutil.copytree(GOLDEN / "tied/model_last", directory / "base")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (model / name).unlink()
    kind = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": base}
    (model / "adapter_config.json").write_text(json.dumps(kind))
    tensors = {}
    for layer, projection, side in product(range(3), ("q_proj", "v_proj"), "AB"):
        module = f"base_model.model.{NAMES[names]}.{layer}.self_attn.{projection}"
        tensors[f"{module}.lora_{side}.weight"] = factors(side, projection, layer)
    save_file(tensors, model / "adapter_model.safetensors")
    return directory / "run"


def loaded(run: Path) -> VlaPolicy:
    options = ModelOptions(checkpoint=str(run), precision=Precision.FLOAT32, max_tokens=60)
    return load_policy(options)


def tokens_of(policy: VlaPolicy | QwenPolicy) -> list[tuple[int, ...]]:
    found = []
    for case in variant("tied")["cases"][:3]:
        image, wrist = cameras(case)
        shown = Observation(image, case["instruction"], {"wrist": wrist})
        trace = policy.act([PolicyRequest(shown)])[0].chunk.trace
        assert trace is not None
        found.append(trace.tokens)
    return found


def _add(change: Tensor, _: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
    return out + given[0] @ change


def beside(policy: VlaPolicy) -> QwenPolicy:
    """transformers with the base's weights as they are, and the adapter beside them."""
    assert isinstance(policy.model, Vla0)
    qwen = build_qwen(policy.model)
    for index, layer in enumerate(qwen.model.language_model.layers):
        for projection in ("q_proj", "v_proj"):
            down, up = (factors(side, projection, index) for side in "AB")
            hook = partial(_add, down.T @ up.T * (ALPHA / RANK))
            getattr(layer.self_attn, projection).register_forward_hook(hook)
    return QwenPolicy(policy, QwenLoop.CONSTRAINED, qwen)


@pytest.mark.parametrize("names", NAMES)
def test_a_merged_adapter_answers_as_transformers_with_it_beside(
    names: str, tmp_path: Path
) -> None:
    policy = loaded(write_run(tmp_path, names))
    found = tokens_of(policy)
    assert found == tokens_of(beside(policy))
    plain = [tuple(one["generated_ids"][:60]) for one in variant("tied")["cases"][:3]]
    assert found != plain


def test_either_folder_and_the_base_may_be_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, "new", base="somewhere/else")
    base, model = str(tmp_path / "base"), run / "model_last"
    with pytest.raises(CheckpointError):
        open_model(ModelOptions(checkpoint=str(model)))
    for adapter in (model, run):
        family = open_model(ModelOptions(checkpoint=base, adapter=str(adapter)))
        assert family.name == "vla0"


def test_the_digest_of_weights_is_of_the_adapter_and_its_base(tmp_path: Path) -> None:
    run = write_run(tmp_path, "new")
    folders = open_model(ModelOptions(checkpoint=str(run))).weight_folders
    expected = {(tmp_path / "base").resolve(), (run / "model_last").resolve()}
    assert {folder.resolve() for folder in folders} == expected


def test_an_adapter_has_the_penalty_of_its_base_and_named_pictures(tmp_path: Path) -> None:
    """The version that saved the base says nothing of the one that trained the adapter."""
    run = write_run(tmp_path, "new")
    path = tmp_path / "base/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "transformers_version": "4.41.2"}))
    model = loaded(run).model
    assert isinstance(model, Vla0)
    assert model.run.names_pictures
    image, wrist = cameras(variant("tied")["cases"][0])
    shown = Observation(image, "lift it", {"wrist": wrist})
    (prompt,) = model.see([shown], StageClock(torch.device("cpu")))
    assert isinstance(prompt.grammar, RepetitionPenalty)
    assert prompt.grammar.penalty == 1.05


def test_an_adapter_of_a_base_in_four_bits_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, "new")
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("use_qlora: false", "use_qlora: true"))
    with pytest.raises(CheckpointError, match="use_qlora"):
        open_model(ModelOptions(checkpoint=str(run)))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, "new")
    path = run / "model_last/adapter_model.safetensors"
    foreign = {name.replace("layers.2", "layers.9"): one for name, one in load_file(path).items()}
    save_file(foreign, path)
    with pytest.raises(CheckpointError, match="the base does not have"):
        open_model(ModelOptions(checkpoint=str(run)))
