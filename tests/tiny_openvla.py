"""OpenVLA models small enough for a test: the golden one from its file, and random ones."""

from functools import lru_cache

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from deft_policies.checkpoint.config import load_config
from deft_policies.decoding.target import Prompt
from deft_policies.model.prompt import PromptTemplate
from deft_policies.model.sizes import (
    ImageProcessorConfig,
    LlamaSizes,
    OpenVLAConfig,
    ResizeStrategy,
    TowerConfig,
    find_action_tokens,
)
from deft_policies.model.statistics import ActionStatistics
from deft_policies.model.vla import OpenVLAModel
from tests import golden

CPU = torch.device("cpu")


@lru_cache(maxsize=1)
def golden_model() -> OpenVLAModel:
    """The golden checkpoint in float32, read without the product's loader."""
    config = load_config(golden.TINY_OPENVLA)
    model = OpenVLAModel.empty(config, CPU, torch.float32)
    with torch.no_grad(), safe_open(golden.TINY_OPENVLA / "model.safetensors", "pt") as weights:
        for name, tensor in model.named_tensors().items():
            tensor.copy_(weights.get_tensor(name))
    return model.requires_grad_(False)


def tiny_config(num_kv_heads: int = 4, num_layers: int = 2) -> OpenVLAConfig:
    """Towers of 4 patches and a small decoder."""
    return OpenVLAConfig(
        llm=LlamaSizes(
            vocabulary=384,
            width=32,
            mlp_width=48,
            num_layers=num_layers,
            num_heads=4,
            num_kv_heads=num_kv_heads,
            head_dim=8,
        ),
        towers=(
            TowerConfig(True, "vision_backbone.featurizer", 16, 3, 2, 24, 28),
            TowerConfig(False, "vision_backbone.fused_featurizer", 24, 2, 2, 40, 28),
        ),
        image=ImageProcessorConfig(
            resize=ResizeStrategy.NAIVE,
            is_stretched=True,
            size=28,
            letterbox_fill=(0, 0, 0),
            normalizations=(((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),) * 2,
        ),
        action_tokens=find_action_tokens(text_vocab_size=320),
        prompt_template=PromptTemplate.OPENVLA,
        statistics={"tiny": ActionStatistics(-np.ones(7), np.ones(7), np.arange(7) < 6)},
    )


def tiny_model(seed: int = 0, num_kv_heads: int = 4, num_layers: int = 2) -> OpenVLAModel:
    """Random weights, large enough that different inputs give different tokens."""
    generator = torch.Generator().manual_seed(seed)
    model = OpenVLAModel.empty(tiny_config(num_kv_heads, num_layers), CPU, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") or "norm1.weight" in name or "norm2.weight" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.3, generator=generator)
    return model.requires_grad_(False)


def random_prompts(model: OpenVLAModel, text_lengths: list[int], seed: int = 0) -> list[Prompt]:
    """Prompts of random embeddings, with these many tokens beside the patches."""
    generator = torch.Generator().manual_seed(seed)
    patches = model.config.num_patches
    shape = (len(text_lengths), max(text_lengths) + patches, model.config.llm.width)
    embeds = torch.randn(shape, generator=generator)
    last = torch.randint(0, 300, (len(text_lengths),), generator=generator).tolist()
    return [
        Prompt(embeds[row, : length + patches], last[row], slice(1, 1 + patches))
        for row, length in enumerate(text_lengths)
    ]


def plain_next_tokens(model: OpenVLAModel, prompt: Tensor, tokens: list[int]) -> list[int]:
    """The greedy token after the prompt and after each of these, without cache or trees.

    `prompt` is [position, width].
    """
    embeds = torch.cat((prompt, model.decoder.embedding(torch.tensor(tokens, dtype=torch.int64))))
    hidden = model.decoder(embeds[None])[0, len(prompt) - 1 :]
    chosen: list[int] = model.decoder.head(hidden).argmax(dim=-1).tolist()
    return chosen


def plain_decode(model: OpenVLAModel, prompt: Tensor, num_tokens: int) -> list[int]:
    """Greedy decoding by recomputing everything for every token."""
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens.append(plain_next_tokens(model, prompt, tokens)[-1])
    return tokens
