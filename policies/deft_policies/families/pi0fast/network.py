"""PaliGemma as pi0-FAST uses it: SigLIP's tower, a linear projector, and a Gemma-1 decoder.

Answers are a few thousand of some 257,000 tokens. Where nothing else may be answered, the decoder's
embedding and its head have those rows alone, and prompts are embedded by the whole table before it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from deft_policies.checkpoint.tensor_file import Shape
from deft_policies.errors import CheckpointError
from deft_policies.model.cpu_products import PackableLinear
from deft_policies.model.gemma import ScaledEmbedding, SiglipTower
from deft_policies.model.llama import LlamaDecoder
from deft_policies.model.sizes import LlamaSizes, TowerConfig, TrainingNotes
from deft_policies.model.statistics import ActionStatistics
from deft_policies.model.tensor_names import TensorPlace, layer_places
from deft_policies.model.vla import VlaNetwork

HEAD, TABLE = "lm_head.weight", "model.language_model.embed_tokens.weight"
_LAYERS, _TOWER = "model.language_model.", "model.vision_tower.vision_model."
_PROJECTOR = "model.multi_modal_projector.linear"
_PREFIX = re.compile(r"^(model\.)?paligemma_with_expert\.paligemma\.")
_SIDE, _PATCH = 224, 14
_TOWER_HEADS = 16  # in no file: of every SigLIP-So400m
_NORM = re.compile(r"model\.language_model\.(layers\.\d+\.\w+_layernorm|norm)\.weight")


@dataclass(frozen=True, eq=False)
class Pi0FastConfig:
    """Sizes of a checkpoint, read off its tensors."""

    llm: LlamaSizes
    tower: TowerConfig
    num_rows: int  # of the table of words
    stored: tuple[str, ...]  # which of table and head the files hold, by our names
    answer_ids: tuple[int, ...]  # rows of the decoder; empty: all
    statistics: Mapping[str, ActionStatistics]
    training: TrainingNotes = TrainingNotes()
    frame_size: int = 224

    @property
    def is_tied(self) -> bool:
        """Whether the one tensor that there is serves as table and as head."""
        return len(self.stored) == 1


class PaliGemma(VlaNetwork):
    """The modules of a checkpoint."""

    config: Pi0FastConfig

    def __init__(self, config: Pi0FastConfig) -> None:
        super().__init__()
        self.config = config
        self.tower = SiglipTower(config.tower)
        self.projector = PackableLinear(config.tower.width, config.llm.width)
        self.decoder = LlamaDecoder(config.llm)
        self.decoder.embedding = ScaledEmbedding(config.llm.vocabulary, config.llm.width)
        # The whole table, and the whole head where that is another, of which the decoder has rows.
        self.table: ScaledEmbedding | None = None
        self.whole_head: nn.Linear | None = None
        if config.answer_ids:
            self.table = ScaledEmbedding(config.num_rows, config.llm.width)
            if not config.is_tied:
                self.whole_head = nn.Linear(config.llm.width, config.num_rows, bias=False)

    @property
    def words(self) -> nn.Embedding:
        """What embeds prompts."""
        return self.decoder.embedding if self.table is None else self.table

    @property
    def head(self) -> Tensor:
        """Of all words, [word, width]."""
        if self.whole_head is not None:
            return self.whole_head.weight
        return self.decoder.head.weight if self.table is None else self.table.weight

    def see(self, pixels: Tensor) -> Tensor:
        """Inputs of the decoder [picture, patch, width] of [picture, 3, height, width]."""
        patches: Tensor = self.projector(self.tower(pixels))
        return patches

    @torch.no_grad()
    def share_rows(self) -> None:
        """Once weights are there: give the decoder its rows, or one table for both of its ends."""
        decoder = self.decoder
        if self.table is None:
            if self.config.is_tied:
                decoder.head.weight = decoder.embedding.weight
            return
        rows = list(self.config.answer_ids)
        decoder.embedding.weight.copy_(self.table.weight[rows])
        decoder.head.weight.copy_(self.head[rows])


def our_name(name: str) -> str:
    """A tensor's name without what LeRobot wraps the model in."""
    return _PREFIX.sub("", name)


# Far beyond any such model: what says more is damaged, and not worth laying out.
_MOST_ROWS, _MOST_WIDTH, _MOST_MLP, _MOST_LAYERS = 1 << 21, 1 << 16, 1 << 18, 1024


def read_sizes(shapes: Mapping[str, Shape], directory: Path) -> tuple[LlamaSizes, TowerConfig]:
    """Sizes of the decoder and of the tower; `shapes` are by our names."""

    def shape(name: str, axes: int) -> Shape:
        dimensions = shapes.get(name, ())
        if len(dimensions) != axes or 0 in dimensions:
            problem = "missing" if name not in shapes else f"of shape {list(dimensions)}"
            raise CheckpointError(
                f"{directory}: the tensor {name} is {problem}, expected {axes} axes; give "
                "pi0-FAST's weights as LeRobot saves them"
            )
        return dimensions

    rows, width = shape(TABLE if TABLE in shapes else HEAD, 2)
    layer = f"{_LAYERS}layers.0."
    inner, _ = shape(f"{layer}self_attn.q_proj.weight", 2)
    head_dim, _ = shape(f"{layer}self_attn.k_proj.weight", 2)  # of one key/value head
    if inner % head_dim or head_dim % 2:
        raise CheckpointError(
            f"{directory}: queries of {inner} numbers are no heads of {head_dim}; only decoders "
            "with one key/value head are known"
        )
    llm = LlamaSizes(
        vocabulary=rows,
        width=width,
        mlp_width=shape(f"{layer}mlp.up_proj.weight", 2)[0],
        num_layers=_count(shapes, f"{_LAYERS}layers."),
        num_heads=inner // head_dim,
        num_kv_heads=1,
        head_dim=head_dim,
        gate="gelu_tanh",
    )
    block = f"{_TOWER}encoder.layers."
    vision_width, _, patch, _ = shape(f"{_TOWER}embeddings.patch_embedding.weight", 4)
    num_patches, _ = shape(f"{_TOWER}embeddings.position_embedding.weight", 2)
    side = round(num_patches**0.5)
    if side * side != num_patches or vision_width % _TOWER_HEADS:
        raise CheckpointError(
            f"{directory}: {num_patches} patches of {vision_width} numbers are no square picture "
            f"and {_TOWER_HEADS} heads, as SigLIP's are"
        )
    tower = TowerConfig(
        is_dino=False,
        prefix=_TOWER,
        width=vision_width,
        depth=_count(shapes, block),
        heads=_TOWER_HEADS,
        mlp=shape(f"{block}0.mlp.fc1.weight", 2)[0],
        image_size=side * patch,
        patch_size=patch,
    )
    for what, size, most in (
        ("words", rows, _MOST_ROWS),
        ("numbers of a row", max(width, inner, vision_width), _MOST_WIDTH),
        ("numbers of an MLP", max(llm.mlp_width, tower.mlp), _MOST_MLP),
        ("layers", max(llm.num_layers, tower.depth), _MOST_LAYERS),
    ):
        if size > most:
            raise CheckpointError(f"{directory}: {size} {what} are more than any model's {most}")
    if (tower.image_size, patch) != (_SIDE, _PATCH):
        raise CheckpointError(
            f"{directory}: the tower looks at {tower.image_size} pixels in patches of {patch}, "
            f"expected {_SIDE} and {_PATCH}"
        )
    return llm, tower


def _count(shapes: Mapping[str, Shape], prefix: str) -> int:
    """How many layers there are; that their numbers have no gap is found with the tensors."""
    names = {name.removeprefix(prefix).split(".")[0] for name in shapes if name.startswith(prefix)}
    return len(names)


def find_places(config: Pi0FastConfig) -> tuple[TensorPlace, ...]:
    """Every tensor of a checkpoint by our names."""
    llm, tower = config.llm, config.tower
    table = (config.num_rows, llm.width)
    words, head = "decoder.embedding.weight", "decoder.head.weight"
    if config.answer_ids:
        words, head = "table.weight", "whole_head.weight"
    places = [*_tower_places(tower), *_linear(_PROJECTOR, "projector", llm.width, tower.width)]
    for index in range(llm.num_layers):
        for place in layer_places(llm):
            name = f"{_LAYERS}layers.{index}.{place.name}.weight"
            ours = f"decoder.layers.{index}.{place.parameter}.weight"
            places.append(replace(place, name=name, parameter=ours))
    places.append(TensorPlace(f"{_LAYERS}norm.weight", (llm.width,), "decoder.norm.weight"))
    parameters = (words,) if config.is_tied else (words, head)
    for name, parameter in zip(config.stored, parameters, strict=True):
        places.append(TensorPlace(name, table, parameter))
    return tuple(places)


def kept(name: str, weight: Tensor) -> Tensor:
    """What is kept of a stored weight, by our name: norms multiply by 1 + weight."""
    return 1.0 + weight.float() if _NORM.fullmatch(name) else weight


def _tower_places(sizes: TowerConfig) -> list[TensorPlace]:
    width, patch = sizes.width, sizes.patch_size
    embeddings = f"{_TOWER}embeddings."
    places = [
        TensorPlace(
            f"{embeddings}patch_embedding.weight", (width, 3, patch, patch), "tower.patch.weight"
        ),
        TensorPlace(f"{embeddings}patch_embedding.bias", (width,), "tower.patch.bias"),
        TensorPlace(
            f"{embeddings}position_embedding.weight", (sizes.num_patches, width), "tower.position"
        ),
        *_norm(f"{_TOWER}post_layernorm", "tower.norm", width),
    ]
    for index in range(sizes.depth):
        theirs, ours = f"{_TOWER}encoder.layers.{index}", f"tower.blocks.{index}"
        places += _norm(f"{theirs}.layer_norm1", f"{ours}.norm1", width)
        for number, one in enumerate("qkv"):
            name = f"{theirs}.self_attn.{one}_proj"
            places += _linear(name, f"{ours}.qkv", width, width, number * width)
        places += _linear(f"{theirs}.self_attn.out_proj", f"{ours}.out", width, width)
        places += _norm(f"{theirs}.layer_norm2", f"{ours}.norm2", width)
        places += _linear(f"{theirs}.mlp.fc1", f"{ours}.mlp_in", sizes.mlp, width)
        places += _linear(f"{theirs}.mlp.fc2", f"{ours}.mlp_out", width, sizes.mlp)
    return places


def _linear(
    theirs: str, ours: str, num_out: int, num_in: int, first_row: int = 0
) -> list[TensorPlace]:
    return [
        TensorPlace(f"{theirs}.weight", (num_out, num_in), f"{ours}.weight", first_row),
        TensorPlace(f"{theirs}.bias", (num_out,), f"{ours}.bias", first_row),
    ]


def _norm(theirs: str, ours: str, width: int) -> list[TensorPlace]:
    return [
        TensorPlace(f"{theirs}.{kind}", (width,), f"{ours}.{kind}") for kind in ("weight", "bias")
    ]
