"""Checkpoint directories for tests: small ones written anew, and copies to damage."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from deft_policies.checkpoint.open import Checkpoint, load_model, locate_checkpoint, open_source
from deft_policies.model.prompt import PromptTemplate
from deft_policies.model.sizes import OpenVLAConfig
from deft_policies.model.tensor_names import tensor_places
from tests import golden
from tests.tiny_openvla import CPU, tiny_config
from tiny_libero_recipe.checkpoint_writer import write_checkpoint
from tiny_libero_recipe.tokenizer import build_tokenizer

INSTRUCTIONS = ("pick up the red mug", "open the drawer")


def open_checkpoint(name: str, adapter: str | None = None) -> Checkpoint:
    """Find a directory's files, or those of an adapter for it, and check all of them."""
    return open_source(locate_checkpoint(name, adapter))


def tensor_shapes(config: OpenVLAConfig) -> dict[str, tuple[int, ...]]:
    """Of every tensor a checkpoint of this configuration has, the unused ones included."""
    return {place.name: place.shape for place in tensor_places(config)}


def random_tensors(
    config: OpenVLAConfig, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Tensor]:
    """Values for all of them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in tensor_shapes(config).items()
    }


def write_tiny(
    directory: Path, config: OpenVLAConfig | None = None, max_shard_bytes: int = 10**9
) -> dict[str, Tensor]:
    """Write a small checkpoint; return its tensors."""
    config = config or tiny_config()
    tensors = random_tensors(config)
    tokenizer = build_tokenizer(INSTRUCTIONS)
    write_checkpoint(directory, config, tensors, tokenizer, max_shard_bytes)
    return tensors


def write_large(directory: Path, mebibytes: int) -> None:
    """Write a checkpoint of about this size in bfloat16, in three shards, layers as wide as 1024.

    All its weights share one small piece of memory.
    """
    config = tiny_config()
    width, mlp = 1024, 2752
    layer_bytes = 2 * (4 * width * width + 3 * width * mlp)
    num_layers = mebibytes * 1024**2 // layer_bytes
    llm = replace(config.llm, width=width, mlp_width=mlp, head_dim=256, num_layers=num_layers)
    config = replace(config, llm=llm)
    value = torch.full((), 0.01, dtype=torch.bfloat16)
    tensors = {name: value.expand(shape) for name, shape in tensor_shapes(config).items()}
    tokenizer = build_tokenizer(INSTRUCTIONS)
    write_checkpoint(directory, config, tensors, tokenizer, mebibytes * 1024**2 // 3)


def link_golden(directory: Path) -> Path:
    """A directory with the golden checkpoint's files, each of which may be replaced."""
    directory.mkdir(parents=True)
    for path in golden.TINY_OPENVLA.iterdir():
        (directory / path.name).symlink_to(path)
    return directory


def replace_file(path: Path, content: bytes) -> None:
    """Put other content in place of a file or link, leaving what the link led to alone."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def edit_json(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Change a JSON object in place."""
    content = json.loads(path.read_text())
    change(content)
    replace_file(path, json.dumps(content).encode())


def loaded_tensors(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    model = load_model(open_checkpoint(str(directory)), CPU, dtype)
    return {name: tensor.clone() for name, tensor in model.named_tensors().items()}


def slow_tensors(path: Path) -> dict[str, Tensor]:
    """The file's tensors, all at once and without the product's reader."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def v01_config() -> OpenVLAConfig:
    """One SigLIP tower, a plain projector and Vicuna's prompt, as in the first release."""
    config = tiny_config()
    siglip = replace(config.towers[1], prefix="vision_backbone.featurizer")
    image = replace(config.image, normalizations=config.image.normalizations[:1])
    return replace(config, towers=(siglip,), image=image, prompt_template=PromptTemplate.V01)
