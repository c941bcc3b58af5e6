"""The modules against what OpenVLA's own code computed, and against openvla-7b's tensor list."""

import dataclasses

import numpy as np
import pytest
import torch

from deft_policies.decoding.sampling import first_maximum, top_gap
from deft_policies.families.openvla import VlaTarget
from deft_policies.model.sizes import OpenVLAConfig
from deft_policies.model.tensor_names import tensor_places
from deft_policies.model.vla import OpenVLAModel
from tests import golden
from tests.policies.checkpoint.checkpoint_files import tensor_shapes
from tests.tiny_openvla import golden_model, tiny_config, tiny_model

WITH_PIXELS = (1, 4)


def pixels_of(number: int) -> torch.Tensor:
    return torch.from_numpy(golden.arrays()[f"pixel_values_{number:02d}"])


def expect_close(found: torch.Tensor, name: str, tolerance: float = 1e-4) -> None:
    expected = torch.from_numpy(golden.arrays()[name])
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0.0)


def test_towers_projector_and_decoder_equal_the_recorded_features() -> None:
    case = golden.cases()[1]
    model = golden_model()
    features = model.look(pixels_of(1))
    dino, siglip = features[0].split([tower.width for tower in model.config.towers], dim=1)
    expect_close(dino, "dinov2_01")
    expect_close(siglip, "siglip_01")
    expect_close(model.projector(features)[0], "patch_embeddings_01")
    hidden = model(pixels_of(1), torch.tensor([case.prompt_ids]))[0]
    expect_close(hidden, "last_hidden_01")
    expect_close(model.decoder.head(hidden[-1]), "last_logits_01", tolerance=1e-3)


@pytest.mark.parametrize("number", WITH_PIXELS)
def test_greedy_tokens_and_margins_equal_openvla_in_float32(number: int) -> None:
    case = golden.cases()[number]
    target = VlaTarget(golden_model())
    (prompt,) = target.read(pixels_of(number), [case.prompt_ids])
    with torch.inference_mode():
        logits = target.logits_along(prompt, 7)
    best = [first_maximum(one) for one in logits]
    assert tuple(map(int, best)) == case.tokens
    margins = [float(top_gap(*both)) for both in zip(logits, best, strict=True)]
    np.testing.assert_allclose(margins, case.margins, atol=1e-3)


def test_prompts_of_a_batch_keep_their_own_lengths() -> None:
    target = VlaTarget(tiny_model())
    pixels = torch.randn(2, 6, 28, 28)
    ids = [(1, 40, 41, 42, 7), (1, 50, 7)]
    prompts = target.read(pixels, ids)
    assert [one.length for one in prompts] == [9, 7]
    assert [one.last_token for one in prompts] == [7, 7]
    (alone,) = target.read(pixels[1:], ids[1:])
    torch.testing.assert_close(prompts[1].embeds, alone.embeds, atol=1e-3, rtol=1e-3)


def test_names_and_shapes_equal_the_real_openvla_7b(openvla_7b: OpenVLAConfig) -> None:
    assert tensor_shapes(openvla_7b) == dict(golden.tensor_shapes_7b())


def test_every_parameter_of_the_7b_is_filled_once(
    openvla_7b: OpenVLAConfig,
) -> None:
    with torch.device("meta"):
        model = OpenVLAModel(openvla_7b)
    filled = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    unused = []
    for place in tensor_places(openvla_7b):
        if place.parameter is None:
            unused.append(place.name)
        else:
            filled[place.parameter] += int(np.prod(place.shape))
    assert filled == sizes
    assert len(unused) == 12 + 12 + 4 + 15
    assert {name.split(".")[2] for name in unused} == {"blocks", "norm", "attn_pool"}


def test_fused_weights_keep_their_published_names() -> None:
    model = tiny_model()
    tensors = model.named_tensors()
    layer = "language_model.model.layers.1"
    with torch.no_grad():
        tensors[f"{layer}.self_attn.k_proj.weight"].fill_(7.0)
        tensors[f"{layer}.mlp.up_proj.weight"].fill_(8.0)
    fused = model.decoder.layers[1]
    assert (fused.attention.qkv.weight == 7.0).sum() == 32 * 32
    assert (fused.attention.qkv.weight[32:64] == 7.0).all()
    assert (fused.mlp.gate_up.weight[48:] == 8.0).all()
    expected = tensor_shapes(model.config)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: expected[name] for name in tensors
    }


def test_gradients_reach_every_parameter_in_training() -> None:
    model = tiny_model().requires_grad_(True).train()
    hidden = model(torch.randn(2, 6, 28, 28), torch.randint(0, 384, (2, 9)))
    logits = model.decoder.head(hidden[:, -7:])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(0, 384, (14,))).backward()
    without = [name for name, one in model.named_parameters() if one.grad is None]
    assert without == []


@pytest.fixture
def openvla_7b() -> OpenVLAConfig:
    """The published sizes."""
    tiny = tiny_config()
    dino, siglip = tiny.towers
    return dataclasses.replace(
        tiny,
        llm=dataclasses.replace(
            tiny.llm,
            vocabulary=32064,
            width=4096,
            mlp_width=11008,
            num_layers=32,
            num_heads=32,
            num_kv_heads=32,
            head_dim=128,
        ),
        towers=(
            dataclasses.replace(dino, width=1024, depth=24, heads=16, mlp=4096, image_size=224),
            dataclasses.replace(siglip, width=1152, depth=27, heads=16, mlp=4304, image_size=224),
        ),
    )
