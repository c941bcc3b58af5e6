"""VLA-0 at its published sizes: parameters, and the memory that `deft doctor` says they take.

No weights are there: files have the headers of such checkpoints and nothing behind them.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from deft_policies.checkpoint.open import weight_bytes
from deft_policies.families.loading import examine, open_model
from deft_policies.families.options import ModelOptions
from deft_policies.families.vla0.network import Vla0Config, Vla0Network, find_places, read_config
from deft_policies.model.formats import Precision, Quantization
from tests.golden_vla0 import GOLDEN
from tests.tiny_openvla import CPU

# Width, layers, heads, kv heads, MLP, words, tied; parameters in all, of vision, of layers.
SIZES = {
    "3B": (2048, 36, 16, 2, 11008, 151936, True, (3.755e9, 0.669e9, 2.775e9)),
    "7B": (3584, 28, 28, 4, 18944, 152064, False, (8.292e9, 0.677e9, 6.526e9)),
}
# In bfloat16 and in int8: weights, the largest tensor on its way there, and room to work.
GIB = {
    "3B": {Quantization.NONE: 7.9, Quantization.INT8: 5.2},
    "7B": {Quantization.NONE: 16.2, Quantization.INT8: 9.8},
}


def write_config(directory: Path, name: str) -> None:
    width, layers, heads, kv_heads, mlp, words, is_tied, _ = SIZES[name]
    config = {
        "model_type": "qwen2_5_vl",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": words,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 128000,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": is_tied,
        "vision_config": {
            "hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "num_heads": 16,
            "out_hidden_size": width, "patch_size": 14, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def write_run(directory: Path, name: str) -> Vla0Config:
    """A run whose model is of a published size: all tensors are holes in one file."""
    run = directory / "run"
    shutil.copytree(GOLDEN / "tied", run)
    model = run / "model_last"
    write_config(model, name)
    config = read_config(model, tuple(range(12)), {})
    header, size = {}, 0
    for place in find_places(config):
        if place.parameter is not None or not config.is_tied:
            end = size + 2 * math.prod(place.shape)
            header[place.name] = {
                "dtype": "BF16",
                "shape": place.shape,
                "data_offsets": [size, end],
            }
            size = end
    head = json.dumps(header).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + size)
    return config


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_have_the_parameters_that_they_should(name: str, tmp_path: Path) -> None:
    *_, is_tied, (every, vision, decoder) = SIZES[name]
    write_config(tmp_path, name)
    found = read_config(tmp_path, tuple(range(12)), {})
    places = find_places(found)
    with torch.device("meta"):
        network = Vla0Network(found)
    assert sum(p.numel() for p in network.vision.parameters()) == pytest.approx(vision, rel=1e-3)
    layer_sizes = sum(p.numel() for p in network.decoder.layers.parameters())
    assert layer_sizes == pytest.approx(decoder, rel=1e-3)
    stored = [math.prod(one.shape) for one in places if one.parameter or not is_tied]
    assert sum(stored) == pytest.approx(every, rel=1e-3)


@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.INT8])
@pytest.mark.parametrize("name", SIZES)
def test_doctor_says_what_memory_published_sizes_take(
    name: str, quantization: Quantization, tmp_path: Path
) -> None:
    config = write_run(tmp_path, name)
    options = ModelOptions(
        checkpoint=str(tmp_path / "run"),
        device="cpu",
        precision=Precision.BFLOAT16,
        quantization=quantization,
    )
    found = {one.subject: one.text for one in examine(options)}
    assert f"about {GIB[name][quantization]} GiB" in found["memory"]
    with torch.device("meta"):
        network = Vla0Network(config)
    matrix_bytes = 1 if quantization is Quantization.INT8 else 2
    needed = sum(
        parameter.numel() * (matrix_bytes if path.startswith("decoder.layers") else 2)
        for path, parameter in network.named_parameters()
    )
    known = weight_bytes(open_model(options).places, CPU, torch.bfloat16, quantization)
    assert known == pytest.approx(needed, rel=1e-3)
