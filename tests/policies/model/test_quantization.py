import logging
from copy import deepcopy
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

from deft_policies.checkpoint.open import load_model
from deft_policies.errors import DeviceError
from deft_policies.model.formats import Quantization
from deft_policies.model.quantization import check_quantization, quantize_linears
from deft_policies.model.vla import OpenVLAModel
from tests import golden
from tests.policies.checkpoint.checkpoint_files import open_checkpoint
from tests.tiny_openvla import CPU, golden_model

pytest.importorskip("torchao")

# Share of the logits' size that the format may change; measured 0.003 and 0.043.
TOLERANCE = {Quantization.INT8: 0.01, Quantization.FP8: 0.1, Quantization.INT4: 0.1}
FORMATS = [Quantization.INT8, Quantization.INT4]  # of torchao


@lru_cache(maxsize=4)
def quantized_model(quantization: Quantization) -> OpenVLAModel:
    checkpoint = open_checkpoint(str(golden.TINY_OPENVLA))
    return load_model(checkpoint, CPU, torch.float32, quantization)


@torch.inference_mode()
def logits_of(model: OpenVLAModel) -> Tensor:
    """Scores behind the golden picture and prompt of case 1."""
    case = golden.cases()[1]
    patches = torch.from_numpy(golden.arrays()["patch_embeddings_01"])[None]
    hidden = model.decoder(model.compose(patches, torch.tensor([case.prompt_ids])))
    logits: Tensor = model.decoder.head(hidden)
    return logits


@pytest.mark.parametrize("quantization", list(TOLERANCE))
def test_logits_of_quantized_weights_stay_close(quantization: Quantization) -> None:
    exact, coarse = logits_of(golden_model()), logits_of(quantized_model(quantization))
    change = float((coarse - exact).norm() / exact.norm())
    assert 0 < change < TOLERANCE[quantization]


def test_fewer_bits_change_more() -> None:
    exact = logits_of(golden_model())
    changes = [float((logits_of(quantized_model(one)) - exact).norm()) for one in FORMATS]
    assert changes == sorted(changes)


@pytest.mark.parametrize("quantization", FORMATS)
def test_only_the_decoders_matrices_are_quantised(quantization: Quantization) -> None:
    model = quantized_model(quantization)
    plain = {
        name: type(one.weight.data) for name, one in model.named_modules() if hasattr(one, "weight")
    }
    changed = {name for name, kind in plain.items() if kind is not Tensor}
    assert changed
    assert all(name.startswith("decoder.layers.") for name in changed)
    assert all(isinstance(model.get_submodule(name), nn.Linear) for name in changed)


def test_int8_takes_a_quarter_of_float32() -> None:
    linear = nn.Sequential(nn.Linear(64, 32, bias=False))
    assert quantize_linears(linear, Quantization.INT8, CPU) == []
    assert linear[0].weight.qdata.dtype is torch.int8


def test_linears_that_do_not_fit_the_groups_stay_and_are_named() -> None:
    module = nn.ModuleDict({"fits": nn.Linear(64, 8), "odd": nn.Linear(43, 8)})
    assert quantize_linears(module, Quantization.INT4, CPU) == ["odd"]
    assert type(module["odd"].weight.data) is Tensor
    assert type(module["fits"].weight.data) is not Tensor


def test_no_quantization_changes_nothing() -> None:
    module = nn.Linear(8, 8)
    before = deepcopy(module.weight.data)
    assert quantize_linears(module, Quantization.NONE, CPU) == []
    check_quantization(Quantization.NONE, torch.device("meta"), torch.float32)
    assert torch.equal(module.weight.data, before)


def test_other_devices_are_refused() -> None:
    with pytest.raises(DeviceError, match="not on meta"):
        check_quantization(Quantization.INT8, torch.device("meta"), torch.float32)


def test_the_library_speaks_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        check_quantization(Quantization.INT8, CPU, torch.float32)
        quantize_linears(nn.Linear(64, 64), Quantization.INT8, CPU)
    assert caplog.records == []
    assert logging.root.manager.disable == logging.NOTSET
