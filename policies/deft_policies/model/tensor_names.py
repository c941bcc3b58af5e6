"""The one table between a checkpoint's tensor names and the parameters of our modules.

Fused parameters take several tensors, each a range of rows. Loading copies tensor to rows, saving
copies rows to tensor, training and LoRA find a weight under its published name.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from deft_policies.model.sizes import LlamaSizes, OpenVLAConfig, TowerConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor of a checkpoint lives in our modules.

    `parameter` is None for what inference never uses; `first_row` counts along the first axis.
    """

    name: str
    shape: Shape
    parameter: str | None = None
    first_row: int = 0

    @property
    def rows(self) -> slice:
        """The rows of the parameter that this tensor fills."""
        return slice(self.first_row, self.first_row + self.shape[0])


def tensor_places(config: OpenVLAConfig) -> tuple[TensorPlace, ...]:
    """Every tensor of a checkpoint of this configuration, in the published order."""
    places: list[TensorPlace] = []
    for index, tower in enumerate(config.towers):
        for place in _tower(tower):
            ours = None if place.parameter is None else f"towers.{index}.{place.parameter}"
            places.append(replace(place, name=f"{tower.prefix}.{place.name}", parameter=ours))
    places.extend(_projector(config))
    places.extend(_decoder(config.llm))
    return tuple(places)


def _with_bias(theirs: str, ours: str | None, shape: Shape) -> Iterator[TensorPlace]:
    """A linear layer, or a norm."""
    for kind, size in (("weight", shape), ("bias", shape[:1])):
        yield TensorPlace(f"{theirs}.{kind}", size, None if ours is None else f"{ours}.{kind}")


def _tower(sizes: TowerConfig) -> Iterator[TensorPlace]:
    width, patch = sizes.width, sizes.patch_size
    if sizes.is_dino:
        yield TensorPlace("cls_token", (1, 1, width), "class_token")
        yield TensorPlace("reg_token", (1, sizes.num_leading - 1, width), "registers")
    yield TensorPlace("pos_embed", (1, sizes.num_patches, width), "position")
    yield TensorPlace("patch_embed.proj.weight", (width, 3, patch, patch), "patch.weight")
    yield TensorPlace("patch_embed.proj.bias", (width,), "patch.bias")
    for index in range(sizes.depth):
        is_used = index < sizes.num_used_blocks
        for place in _block(sizes):
            ours = f"blocks.{index}.{place.parameter}" if is_used else None
            yield replace(place, name=f"blocks.{index}.{place.name}", parameter=ours)
    yield from _with_bias("norm", None, (width,))
    if not sizes.is_dino:
        yield from _attention_pool(sizes)


def _block(sizes: TowerConfig) -> Iterator[TensorPlace]:
    width, mlp_width = sizes.width, sizes.mlp
    yield from _with_bias("norm1", "norm1", (width,))
    yield from _with_bias("attn.qkv", "qkv", (3 * width, width))
    yield from _with_bias("attn.proj", "out", (width, width))
    if sizes.is_dino:
        yield TensorPlace("ls1.scale_factor", (width,), "scale1")
    yield from _with_bias("norm2", "norm2", (width,))
    yield from _with_bias("mlp.fc1", "mlp_in", (mlp_width, width))
    yield from _with_bias("mlp.fc2", "mlp_out", (width, mlp_width))
    if sizes.is_dino:
        yield TensorPlace("ls2.scale_factor", (width,), "scale2")


def _attention_pool(sizes: TowerConfig) -> Iterator[TensorPlace]:
    width, mlp_width = sizes.width, sizes.mlp
    yield TensorPlace("attn_pool.latent", (1, 1, width))
    yield from _with_bias("attn_pool.q", None, (width, width))
    yield from _with_bias("attn_pool.kv", None, (2 * width, width))
    yield from _with_bias("attn_pool.proj", None, (width, width))
    yield from _with_bias("attn_pool.norm", None, (width,))
    yield from _with_bias("attn_pool.mlp.fc1", None, (mlp_width, width))
    yield from _with_bias("attn_pool.mlp.fc2", None, (width, mlp_width))


def _projector(config: OpenVLAConfig) -> Iterator[TensorPlace]:
    vision, width = config.vision_width, config.llm.width
    inner = 4 * vision if config.is_fused else width
    yield from _with_bias("projector.fc1", "projector.fc1", (inner, vision))
    yield from _with_bias("projector.fc2", "projector.fc2", (width, inner))
    if config.is_fused:
        yield from _with_bias("projector.fc3", "projector.fc3", (width, width))


def _decoder(sizes: LlamaSizes) -> Iterator[TensorPlace]:
    table = (sizes.vocabulary, sizes.width)
    yield TensorPlace("language_model.model.embed_tokens.weight", table, "decoder.embedding.weight")
    for index in range(sizes.num_layers):
        for place in layer_places(sizes):
            yield replace(
                place,
                name=f"language_model.model.layers.{index}.{place.name}.weight",
                parameter=f"decoder.layers.{index}.{place.parameter}.weight",
            )
    yield TensorPlace("language_model.model.norm.weight", (sizes.width,), "decoder.norm.weight")
    yield TensorPlace("language_model.lm_head.weight", table, "decoder.head.weight")


def layer_places(sizes: LlamaSizes) -> Iterator[TensorPlace]:
    """The weights of one decoder layer, by names that leave `.weight` out."""
    width, mlp_width = sizes.width, sizes.mlp_width
    inner, shared = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    yield TensorPlace("self_attn.q_proj", (inner, width), "attention.qkv")
    yield TensorPlace("self_attn.k_proj", (shared, width), "attention.qkv", inner)
    yield TensorPlace("self_attn.v_proj", (shared, width), "attention.qkv", inner + shared)
    yield TensorPlace("self_attn.o_proj", (width, inner), "attention.out")
    yield TensorPlace("mlp.gate_proj", (mlp_width, width), "mlp.gate_up")
    yield TensorPlace("mlp.up_proj", (mlp_width, width), "mlp.gate_up", mlp_width)
    yield TensorPlace("mlp.down_proj", (width, mlp_width), "mlp.down")
    yield TensorPlace("input_layernorm", (width,), "attention_norm")
    yield TensorPlace("post_attention_layernorm", (width,), "mlp_norm")
