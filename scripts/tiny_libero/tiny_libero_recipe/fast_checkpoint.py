"""Writes a small pi0-FAST as LeRobot saves one.

A folder appears whole or not at all.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from deft_core.files import creating
from deft_policies.checkpoint.config import CONFIG_FILE
from deft_policies.checkpoint.tensor_file import MODEL_FILE, write_tensors
from deft_policies.families.pi0fast.files import IMAGES, TYPE
from tiny_libero_recipe.fast_format import (
    ACTION,
    FAST_FOLDER,
    STATE,
    STATISTICS_FILE,
    TEXT_FOLDER,
    FastFormat,
    write_tokenizers,
)

Json = dict[str, object]

CAMERA = f"{IMAGES}image"
MAX_PROMPT = 200  # tokens, LeRobot's own
_WRAPPER = "model.paligemma_with_expert.paligemma."
_MODES = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
_UNNORMALIZER_FILE = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"


def write_fast_checkpoint(
    directory: Path, given: FastFormat, tensors: Mapping[str, Tensor], frame_size: int
) -> None:
    """Write a new folder: settings, pipelines, statistics, tokenizers and weights."""
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    image: Json = {"type": "VISUAL", "shape": [3, frame_size, frame_size]}
    seen: Json = {CAMERA: image, STATE: {"type": "STATE", "shape": [given.state.dim]}}
    acted: Json = {ACTION: {"type": "ACTION", "shape": [given.action.dim]}}
    statistics = {name: torch.from_numpy(one) for name, one in given.statistics.items()}
    with creating(directory) as beside:
        write_tensors(
            {_WRAPPER + name: tensor for name, tensor in tensors.items()},
            beside / MODEL_FILE,
            {"format": "pt"},
        )
        for name in (STATISTICS_FILE, _UNNORMALIZER_FILE):
            write_tensors(statistics, beside / name)
        write_tokenizers(given, beside)
        pipelines = {
            "policy_preprocessor": _steps_before({**seen, **acted}),
            "policy_postprocessor": _steps_behind(acted),
        }
        for name, steps in pipelines.items():
            _write_json(beside / f"{name}.json", {"name": name, "steps": steps})
        _write_json(beside / CONFIG_FILE, _describe(given, seen, acted, dtype))


def _describe(given: FastFormat, seen: Json, acted: Json, dtype: str) -> Json:
    return {
        "action_tokenizer_name": FAST_FOLDER,
        "chunk_size": given.horizon,
        "dtype": dtype,
        "fast_skip_tokens": 0,
        "image_resolution": [224, 224],
        "input_features": seen,
        "max_decoding_steps": 256,
        "max_state_dim": 32,
        "n_action_steps": given.horizon,
        "normalization_mapping": _MODES,
        "output_features": acted,
        "temperature": 0.0,
        "text_tokenizer_name": TEXT_FOLDER,
        "tokenizer_max_length": MAX_PROMPT,
        "type": TYPE,
        "use_relative_actions": False,
    }


def _steps_before(features: Json) -> list[Json]:
    return [
        _step("rename_observations_processor", rename_map={}),
        _step("to_batch_processor"),
        _step("relative_actions_processor", enabled=False, exclude_joints=[]),
        {
            **_step("normalizer_processor", eps=1e-8, features=features, norm_map=_MODES),
            "state_file": STATISTICS_FILE,
        },
        _step("pi0_fast_prepare_state_tokenizer_processor_step"),
        _step(
            "tokenizer_processor",
            max_length=MAX_PROMPT,
            padding="max_length",
            padding_side="right",
            task_key="task",
            tokenizer_name=TEXT_FOLDER,
            truncation=True,
        ),
        _step("action_tokenizer_processor", action_tokenizer_name=FAST_FOLDER),
        _step("device_processor", device="cpu"),
    ]


def _steps_behind(features: Json) -> list[Json]:
    return [
        {
            **_step("unnormalizer_processor", eps=1e-8, features=features, norm_map=_MODES),
            "state_file": _UNNORMALIZER_FILE,
        },
        _step("absolute_actions_processor", enabled=False),
        _step("device_processor", device="cpu"),
    ]


def _step(name: str, **config: object) -> Json:
    return {"registry_name": name, "config": config}


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
