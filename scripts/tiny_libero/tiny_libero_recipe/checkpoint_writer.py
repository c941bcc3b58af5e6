"""Writes checkpoints in the layout that the reader reads, with no special case: Hugging Face's.

A directory appears whole or not at all.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor

from deft_core.files import creating
from deft_policies.checkpoint.config import (
    CONFIG_FILE,
    DINOV2_TIMM_ID,
    MODEL_TYPE,
    PREPROCESSOR_FILE,
    SIGLIP_TIMM_ID,
    STATISTICS_FILE,
    TRAINING_FILE,
)
from deft_policies.checkpoint.open import check_tensors
from deft_policies.checkpoint.tensor_file import INDEX_FILE, MODEL_FILE, write_tensors
from deft_policies.errors import CheckpointError
from deft_policies.model.prompt import PromptTemplate
from deft_policies.model.sizes import (
    ImageProcessorConfig,
    LlamaSizes,
    OpenVLAConfig,
    ResizeStrategy,
    TowerConfig,
    TrainingNotes,
)
from deft_policies.model.statistics import ActionStatistics
from deft_policies.model.tensor_names import tensor_places
from tiny_libero_recipe.tokenizer import write_tokenizer

MAX_SHARD_BYTES = 5 * 1024**3
_FORMAT = {"format": "pt"}  # what readers of Hugging Face's ask of a file
_BICUBIC = 3  # in Pillow's numbering, which the processor's file uses

# What the arrays of action statistics are called in the file, and here.
_STATISTICS = {
    **{"mean": "mean", "std": "std", "q01": "low", "q99": "high", "mask": "mask"},
    **{"max": "maximum", "min": "minimum"},
}

Json = dict[str, object]


def write_checkpoint(
    directory: Path,
    config: OpenVLAConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a new directory: weights under their published names, configuration, tokenizer.

    Tensors that inference never uses may be left out. The statistics are the configuration's.
    """
    if directory.exists():
        raise CheckpointError(f"{directory} exists already; give a directory that does not")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_tensors(directory, shapes, tensor_places(config))
    dtype = next(iter(tensors.values())).dtype
    try:
        with creating(directory) as beside:
            _write_tensors(beside, tensors, max_shard_bytes)
            _write_json(beside / CONFIG_FILE, describe_config(config, dtype))
            _write_json(beside / PREPROCESSOR_FILE, _describe_processor(config.image))
            _write_json(beside / STATISTICS_FILE, _describe_statistics(config.statistics))
            if config.training != TrainingNotes():
                _write_json(beside / TRAINING_FILE, asdict(config.training))
            write_tokenizer(tokenizer, beside)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{directory} could not be written ({error}); free some space and write again"
        ) from None


def describe_config(config: OpenVLAConfig, dtype: torch.dtype) -> Json:
    """What `config.json` says, every size spelt out."""
    is_fused = config.is_fused
    is_v01 = config.prompt_template is PromptTemplate.V01
    return {
        "arch_specifier": f"no-align+{'fused-' if is_fused else ''}gelu-mlp",
        "architectures": ["OpenVLAForActionPrediction"],
        "image_resize_strategy": config.image.resize.value,
        "image_sizes": [tower.image_size for tower in config.towers],
        "llm_backbone_id": "vicuna-v15-7b" if is_v01 else "llama2-7b-pure",
        "llm_max_length": config.llm.max_positions,
        "model_type": MODEL_TYPE,
        "n_action_bins": len(config.action_tokens),
        "norm_stats": _describe_statistics(config.statistics),
        "output_projector_states": False,
        "pad_to_multiple_of": config.llm.vocabulary - config.action_tokens.last - 1,
        "text_config": _describe_llm(config.llm, dtype),
        "timm_model_ids": [
            DINOV2_TIMM_ID if tower.is_dino else SIGLIP_TIMM_ID for tower in config.towers
        ],
        "timm_override_act_layers": [None for _ in config.towers],
        "torch_dtype": _dtype_name(dtype),
        "use_fused_vision_backbone": is_fused,
        "vision_backbone_id": "dinosiglip-vit-so-224px" if is_fused else "siglip-vit-so400m",
        "vision_sizes": {
            "dinov2" if tower.is_dino else "siglip": _describe_tower(tower)
            for tower in config.towers
        },
    }


def _describe_llm(llm: LlamaSizes, dtype: torch.dtype) -> Json:
    return {
        "head_dim": llm.head_dim,
        "hidden_size": llm.width,
        "intermediate_size": llm.mlp_width,
        "max_position_embeddings": llm.max_positions,
        "model_type": "llama",
        "num_attention_heads": llm.num_heads,
        "num_hidden_layers": llm.num_layers,
        "num_key_value_heads": llm.num_kv_heads,
        "rms_norm_eps": llm.norm_eps,
        "rope_theta": llm.rope_theta,
        "torch_dtype": _dtype_name(dtype),
        "vocab_size": llm.vocabulary,
    }


def _describe_tower(tower: TowerConfig) -> Json:
    names = ("width", "depth", "heads", "mlp", "patch_size")
    return {name: getattr(tower, name) for name in names}


def _describe_processor(image: ImageProcessorConfig) -> Json:
    towers = image.normalizations
    size: object = [image.size, image.size] if image.is_stretched else image.size
    is_letterbox = image.resize is ResizeStrategy.LETTERBOX
    resize = {"antialias": True, "interpolation": _BICUBIC, "max_size": None, "size": size}
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": image.resize.value,
        "input_sizes": [[3, image.size, image.size] for _ in towers],
        "interpolations": ["bicubic" for _ in towers],
        "means": [list(mean) for mean, _ in towers],
        "stds": [list(std) for _, std in towers],
        "tvf_crop_params": [{"output_size": [image.size, image.size]} for _ in towers],
        "tvf_do_letterbox": is_letterbox,
        "tvf_letterbox_fill": list(image.letterbox_fill) if is_letterbox else None,
        "tvf_normalize_params": [
            {"inplace": False, "mean": list(mean), "std": list(std)} for mean, std in towers
        ],
        "tvf_resize_params": [resize for _ in towers],
        "use_fused_vision_backbone": len(towers) > 1,
    }


def _describe_statistics(statistics: Mapping[str, ActionStatistics]) -> Json:
    return {
        key: {
            "action": {
                name: getattr(one, attribute).tolist()
                for name, attribute in _STATISTICS.items()
                if getattr(one, attribute) is not None
            },
            "num_transitions": one.num_transitions,
            "num_trajectories": one.num_trajectories,
        }
        for key, one in statistics.items()
    }


def _write_tensors(directory: Path, tensors: Mapping[str, Tensor], max_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    room = max_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = max_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        write_tensors(shards[0], directory / MODEL_FILE, _FORMAT)
        return
    weight_map = {}
    for index, shard in enumerate(shards, start=1):
        file_name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(shard, directory / file_name, _FORMAT)
        weight_map.update(dict.fromkeys(shard, file_name))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index_content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / INDEX_FILE, index_content)


def _write_json(path: Path, content: Mapping[str, object] | list[str]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
