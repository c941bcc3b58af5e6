"""pi0-FAST at its published size: parameters, and the memory that `deft doctor` says they take.

No weights are there: the file has the header of such a checkpoint and nothing behind it.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from deft_policies.families.loading import examine, open_model
from deft_policies.families.pi0fast.family import Pi0FastFamily
from deft_policies.families.pi0fast.network import HEAD, TABLE, Pi0FastConfig, find_places
from deft_policies.model.formats import Precision
from deft_policies.model.sizes import LlamaSizes, TowerConfig
from tests.golden_pi0fast import GOLDEN, options_of

ROWS = 257152
LLM = LlamaSizes(
    vocabulary=ROWS,
    width=2048,
    mlp_width=16384,
    num_layers=18,
    num_heads=8,
    num_kv_heads=1,
    head_dim=256,
    gate="gelu_tanh",
)
TOWER = TowerConfig(False, "", width=1152, depth=27, heads=16, mlp=4304)
ONE, TWO = (HEAD,), (TABLE, HEAD)


def folder_of(stored: tuple[str, ...], folder: Path) -> Path:
    """All tensors are holes in one file."""
    shutil.copytree(GOLDEN / "quantile", folder)
    header, size = {}, 0
    for place in find_places(Pi0FastConfig(LLM, TOWER, ROWS, stored, (), {})):
        name = f"model.paligemma_with_expert.paligemma.{place.name}"
        num_bytes = 2 * math.prod(place.shape)
        offsets = [size, size + num_bytes]
        header[name] = {"dtype": "BF16", "shape": list(place.shape), "data_offsets": offsets}
        size += num_bytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    return folder


@pytest.mark.parametrize(
    ("stored", "grammar", "billions", "gib"),
    [
        (ONE, "on", "2.925", 6.7),
        (ONE, "off", "2.923", 6.7),
        (TWO, "on", "3.451", 7.7),
        (TWO, "off", "3.450", 7.7),
    ],
)
def test_a_real_checkpoints_parameters_and_memory(
    stored: tuple[str, ...], grammar: str, billions: str, gib: float, tmp_path: Path
) -> None:
    """As counted by hand: 3.96 GB of layers a token in bfloat16, and 18.4 kB in the cache."""
    checkpoint = str(folder_of(stored, tmp_path / "real"))
    options = options_of(checkpoint, grammar=grammar, precision=Precision.BFLOAT16, device="cpu")
    found = {one.subject: one.text for one in examine(options)}
    assert f"needs about {gib} GiB" in found["memory"]
    text = found["arithmetic"]
    assert text.startswith(f"{billions} billion weights")
    assert "3.96 GB of layers" in text
    assert f"{0.0 if grammar == 'on' else 1.05:.2f} GB of the head" in text
    assert "18.4 kB" in text
    assert "572 rows computes 2.3 TFLOP" in text
    assert "2 picture(s) 0.4" in text


def test_what_passes_set_aside_on_a_gpu_is_small_with_the_rows_of_answers(tmp_path: Path) -> None:
    checkpoint = str(folder_of(ONE, tmp_path / "real"))
    planned = {}
    for grammar in ("on", "off"):
        family = open_model(options_of(checkpoint, grammar=grammar))
        assert isinstance(family, Pi0FastFamily)
        planned[grammar] = family.planned_bytes(torch.bfloat16)
    assert planned["on"]["keys and values"] < 200 * 2**20
    assert planned["on"]["scores"] < 20 * 2**20
    assert planned["off"]["scores"] > 500 * 2**20
