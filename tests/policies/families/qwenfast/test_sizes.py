"""QwenFAST at its published size: parameters, and the memory that `deft doctor` says they take.

No weights are there: files have the headers of such checkpoints and nothing behind them.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from deft_policies.families.loading import examine, open_model
from deft_policies.families.options import ModelOptions
from deft_policies.families.qwenfast.family import QwenFastFamily
from deft_policies.families.vla0.network import find_places, read_config
from deft_policies.model.formats import Precision, Quantization
from tests.golden_qwenfast import GOLDEN, variant
from tests.policies.families.vla0.test_sizes import write_config

ROWS = 153713
PARAMETERS, STORED = 3.758e9, 4.073e9  # the head is stored beside the table that it is
GIB = {Quantization.NONE: 7.9, Quantization.INT8: 5.3}  # weights and room to work, on a CPU
PLANNED_MIB = {"keys and values": (150, 250), "scores": (340, 360)}  # of eight answers, on a GPU


@pytest.fixture
def family(tmp_path: Path) -> QwenFastFamily:
    """A run of the published size: all tensors are holes in one file."""
    checkpoint = Path(variant("bridge")["checkpoint"])
    root = tmp_path / "tree"
    shutil.copytree(GOLDEN / checkpoint.parts[0], root)
    run = root.joinpath(*checkpoint.parts[1:])
    (base,) = (root / "playground/Pretrained_models").glob("Qwen*")
    small = open_model(ModelOptions(checkpoint=str(run)))
    assert isinstance(small, QwenFastFamily)
    write_config(base, "3B")
    sizes = read_config(base, (), {})
    header, size = {}, 0
    for place in find_places(sizes):
        is_table = place.name.endswith(("embed_tokens.weight", "lm_head.weight"))
        shape = (ROWS, sizes.llm.width) if is_table else place.shape
        end = size + 2 * math.prod(shape)
        name = f"qwen_vl_interface.model.{place.name}"
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [size, end]}
        size = end
    head = json.dumps(header).encode()
    with (run / "checkpoints/steps_10000_model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + size)
    assert size / 2 == pytest.approx(STORED, rel=1e-3)
    found = open_model(ModelOptions(checkpoint=str(run)))
    assert isinstance(found, QwenFastFamily)
    return found


def test_doctor_says_what_memory_it_takes(family: QwenFastFamily) -> None:
    assert family.source is not None
    kept = sum(math.prod(one.shape) for one in family.places)
    assert kept == pytest.approx(PARAMETERS, rel=1e-3)
    for quantization, gib in GIB.items():
        options = ModelOptions(
            checkpoint=str(family.source.directory),
            device="cpu",
            precision=Precision.BFLOAT16,
            quantization=quantization,
        )
        found = {one.subject: one.text for one in examine(options)}
        assert f"about {gib} GiB" in found["memory"]


def test_what_a_gpu_sets_aside_is_planned(family: QwenFastFamily) -> None:
    planned = family.planned_bytes(torch.bfloat16)
    for name, (least, most) in PLANNED_MIB.items():
        assert least < planned[name] / 2**20 < most
