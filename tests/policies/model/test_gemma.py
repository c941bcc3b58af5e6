"""What tells PaliGemma from Llama and from OpenVLA's towers, against spelled-out twins."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.decoding.target import PassRow, Prompt, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.model import cpu_products
from deft_policies.model.gemma import ScaledEmbedding, SiglipTower
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.llama import LlamaDecoder
from deft_policies.model.sizes import LlamaSizes, TokenRange, TowerConfig
from deft_policies.model.vla import fuse

SIZES = LlamaSizes(
    vocabulary=40,
    width=24,
    mlp_width=48,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=16,
    gate="gelu_tanh",
    max_positions=64,
)
TOWER = TowerConfig(False, "", width=32, depth=3, heads=4, mlp=48, image_size=28, patch_size=14)


def drawn(module: torch.nn.Module, seed: int = 0, std: float = 0.4) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std, generator=generator)
    module.requires_grad_(False).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_words_are_multiplied_by_the_root_of_their_width_as_their_format_has_it(
    dtype: torch.dtype,
) -> None:
    table = ScaledEmbedding(5, 2048).to(dtype)
    drawn(table)
    found = table(torch.tensor([3, 0]))
    factor = 45.25 if dtype is torch.bfloat16 else float(torch.tensor(math.sqrt(2048)))
    assert found.equal(table.weight[[3, 0]] * factor)
    assert found.dtype == dtype


def test_the_mlp_opens_by_gelu_in_passes_as_in_whole_sequences() -> None:
    decoder = LlamaDecoder(SIZES)
    drawn(decoder)
    target, tokens = Target(decoder, TokenRange(0, -1)), [3, 1, 39, 7, 7]
    embeds = decoder.embedding(torch.tensor(tokens))
    whole = decoder.head(decoder(embeds[None]))[0]
    prompt = Prompt(embeds[:2], tokens[1])
    row = PassRow(0, 1, DraftTree.of_committed(tokens[1:]), 0, prompt=prompt)
    scores = target.forward(target.new_cache(), [row])
    torch.testing.assert_close(scores.logits, whole[1:], rtol=1e-4, atol=1e-4)
    # Whole sequences are computed by a twin, too, layer by layer.
    layer, normed = decoder.layers[0], torch.randn(3, SIZES.width)
    gate, up = (normed @ layer.mlp.gate_up.weight.t()).chunk(2, dim=1)
    by_hand = gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(layer.mlp(normed), (by_hand * up) @ layer.mlp.down.weight.t())
    plain = LlamaDecoder(replace(SIZES, gate="silu")).layers[0]
    plain.load_state_dict(layer.state_dict())
    assert not plain.mlp(normed).allclose(layer.mlp(normed), atol=1e-3)


def test_the_tower_uses_every_block_and_its_last_norm() -> None:
    tower = SiglipTower(TOWER)
    drawn(tower)
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(tower(pixels), spelled_out(tower, pixels), rtol=1e-4, atol=1e-4)


FORMATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return dict.fromkeys(("rtol", "atol"), 2e-4 if dtype is torch.float32 else 3e-2)


@FORMATS
def test_fused_passes_open_by_gelu_behind_a_prompt_that_sees_itself(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter cannot multiply bfloat16; float16 takes the same way."""
    pytest.importorskip("triton", reason="fused kernels need Triton")
    from tests.triton_twins import Counted

    monkeypatch.setattr(cpu_products, "_AMONG", (8,))  # rows that loading asks about
    monkeypatch.setattr(cpu_products, "_ALONE", (0, 5))
    decoder, counted = LlamaDecoder(SIZES), Counted()
    drawn(decoder, std=0.2)
    expected = prefill_and_pass(decoder.to(dtype))
    decoder.kernels = counted.kernels
    for found, plain in zip(prefill_and_pass(decoder), expected, strict=True):
        torch.testing.assert_close(found, plain, **tolerance(dtype))
    opened = {torch.float32: "gate_times_up", torch.float16: "product_opened"}[dtype]
    assert {"attend", opened} <= set(counted.launched)


def prefill_and_pass(decoder: LlamaDecoder) -> list[Tensor]:
    """Scores of guesses in a prefill and of a pass behind it, in the shapes of captured ones."""
    reserve = Reserve(rows=1, shortest=16, longest=16)
    target = Target(decoder, TokenRange(0, 39), runner=StepRunner(reserve=reserve))
    cache, generator = target.new_cache(), torch.Generator().manual_seed(2)
    target.set_aside(cache, widest=8, num_tokens=8)
    embeds = torch.randn(11, SIZES.width, generator=generator).to(decoder.head.weight.dtype)
    prompt = Prompt(embeds, 3, two_way=11)
    found = []
    for root, tokens, its_prompt in ((10, [3, 7, 1], prompt), (13, [5, 9], None)):
        row = PassRow(0, root, DraftTree.of_committed(tokens), 0, prompt=its_prompt)
        scores = target.forward(cache, [row])
        found.append(scores.logits[scores.nodes(0, row.tree)].clone())
    return found


@FORMATS
def test_fused_kernels_see_what_the_tower_does(dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="fused kernels need Triton")
    from tests.triton_twins import Counted

    tower, counted = SiglipTower(TOWER), Counted()
    drawn(tower, std=0.2)
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = tower.to(dtype)(pixels)
    fuse(tower, counted.kernels)
    torch.testing.assert_close(tower(pixels), expected, **tolerance(dtype))
    assert counted.launched.count("add_layer_norm") == 2 * TOWER.depth
    products = 1 + 4 * TOWER.depth
    assert counted.launched.count("product") == products * (dtype is torch.float16)


def spelled_out(tower: SiglipTower, pixels: Tensor) -> Tensor:
    """One picture and one head at a time."""
    weights = dict(tower.named_parameters())

    def linear(hidden: Tensor, name: str) -> Tensor:
        return functional.linear(hidden, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(hidden: Tensor, name: str) -> Tensor:
        given = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return functional.layer_norm(hidden, (TOWER.width,), *given, 1e-6)

    seen = []
    for picture in pixels:
        cut = functional.conv2d(picture, weights["patch.weight"], weights["patch.bias"], stride=14)
        hidden = cut.flatten(1).t() + weights["position"][0]
        for index in range(TOWER.depth):
            block = f"blocks.{index}."
            fused = linear(norm(hidden, f"{block}norm1"), f"{block}qkv")
            heads = []
            for head in range(TOWER.heads):
                size = TOWER.width // TOWER.heads
                query, key, value = (
                    part[:, head * size : (head + 1) * size] for part in fused.chunk(3, dim=1)
                )
                heads.append((query @ key.t() / math.sqrt(size)).softmax(dim=1) @ value)
            hidden = hidden + linear(torch.cat(heads, dim=1), f"{block}out")
            inner = linear(norm(hidden, f"{block}norm2"), f"{block}mlp_in")
            gelu = functional.gelu(inner, approximate="tanh")
            hidden = hidden + linear(gelu, f"{block}mlp_out")
        seen.append(norm(hidden, "norm"))
    return torch.stack(seen)
