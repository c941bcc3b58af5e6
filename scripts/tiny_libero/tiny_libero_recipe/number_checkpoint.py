"""Writes a policy that writes numbers as a run's folder of VLA-0.

A folder appears whole or not at all.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from deft_core.files import creating
from deft_policies.checkpoint.config import CONFIG_FILE, PREPROCESSOR_FILE, TRAINING_FILE
from deft_policies.checkpoint.tensor_file import MODEL_FILE, write_tensors
from deft_policies.families.vla0.network import Vla0Config
from deft_policies.families.vla0.prompt import END, IMAGE_PAD
from deft_policies.families.vla0.run_folder import MODEL_FOLDER, RUN_FILE, RunFolder
from deft_policies.model.qwen_vision import FRAMES, MERGE, PATCH
from tiny_libero_recipe.number_tokenizer import PAD_PIECE, write_number_tokenizer

Json = dict[str, object]

# CLIP's, which Qwen2.5-VL's processor uses.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_TEMPLATE = (
    "{%- set pictures = namespace(count=0) -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{%- set pictures.count = pictures.count + 1 -%}"
    "{%- if add_vision_id -%}{{ 'Picture ' ~ pictures.count ~ ': ' }}{%- endif -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def write_number_checkpoint(
    directory: Path,
    run: RunFolder,
    config: Vla0Config,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer,
) -> None:
    """Write a new folder: what the run says, its statistics, and the model under its names."""
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    with creating(directory) as beside:
        _write_json(beside / RUN_FILE, _describe_run(run))  # JSON is YAML
        ends = {"min": run.lowest.tolist(), "max": run.highest.tolist()}
        _write_json(beside / "dataset_stats.json", {"out_ori_act": ends})
        model = beside / MODEL_FOLDER
        model.mkdir()
        write_tensors(tensors, model / MODEL_FILE, {"format": "pt"})
        _write_json(model / CONFIG_FILE, _describe_model(config, tokenizer, dtype))
        _write_json(model / TRAINING_FILE, asdict(config.training))
        _write_json(model / PREPROCESSOR_FILE, _describe_processor(run))
        _write_json(model / "generation_config.json", _describe_generation(run, tokenizer))
        _write_json(model / "chat_template.json", {"chat_template": _TEMPLATE})
        write_number_tokenizer(tokenizer, model)


def _describe_run(run: RunFolder) -> Json:
    cameras = ",".join(f"'3p{number + 1}'" for number in range(run.num_cameras))
    pictures = f"IMAGE.crop_img:{run.crop}:IMAGE.img_size:{run.size}:IMAGE.cam_list:({cameras},)"
    qwen = {
        "action_type": "original",
        "add_vision_id": run.names_pictures,
        "history": 1,
        "horizon": run.num_steps,
        "num_bins_actions": run.num_bins,
        "num_cam": run.num_cameras,
        "original_action_dim": run.action_dim,
        "rgb_img_size": [run.size, run.size],
        "rgb_input": True,
        "tiled_rgb_imgs": run.is_tiled,
    }
    return {"DATALOADER": {"ROBOVERSE": {"cfg_opts": pictures}}, "MODEL": {"QWEN": qwen}}


def _describe_model(config: Vla0Config, tokenizer: Tokenizer, dtype: str) -> Json:
    llm, vision = config.llm, config.vision
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "dtype": dtype,
        "image_token_id": tokenizer.token_to_id(IMAGE_PAD),
        "model_type": "qwen2_5_vl",
        "text_config": {
            "dtype": dtype,
            "hidden_act": "silu",
            "hidden_size": llm.width,
            "intermediate_size": llm.mlp_width,
            "max_position_embeddings": llm.max_positions,
            "model_type": "qwen2_5_vl_text",
            "num_attention_heads": llm.num_heads,
            "num_hidden_layers": llm.num_layers,
            "num_key_value_heads": llm.num_kv_heads,
            "rms_norm_eps": llm.norm_eps,
            "rope_parameters": {
                "mrope_section": list(config.mrope_section),
                "rope_theta": llm.rope_theta,
                "rope_type": "default",
            },
            "tie_word_embeddings": config.is_tied,
            "use_sliding_window": False,
            "vocab_size": config.vocab_size,
        },
        "tie_word_embeddings": config.is_tied,
        "transformers_version": "5.23.0",  # of the layout of these files
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_config": {
            "depth": vision.num_blocks,
            "fullatt_block_indexes": sorted(vision.full_blocks),
            "hidden_act": "silu",
            "hidden_size": vision.width,
            "in_channels": 3,
            "intermediate_size": vision.mlp_width,
            "model_type": "qwen2_5_vl_vision",
            "num_heads": vision.num_heads,
            "out_hidden_size": vision.out_width,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": FRAMES,
            "window_size": vision.window,
        },
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
    }


def _describe_processor(run: RunFolder) -> Json:
    pixels = run.size**2
    return {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(_MEAN),
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_std": list(_STD),
        "max_pixels": pixels,
        "merge_size": MERGE,
        "min_pixels": pixels,
        "patch_size": PATCH,
        "processor_class": "Qwen2_5_VLProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": pixels, "shortest_edge": pixels},
        "temporal_patch_size": FRAMES,
    }


def _describe_generation(run: RunFolder, tokenizer: Tokenizer) -> Json:
    return {
        "do_sample": False,
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD_PIECE),
        "repetition_penalty": run.repetition_penalty,
    }


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
