"""Qwen2.5-VL as VLA-0 uses it: the vision tower, the table of words and a decoder of numbers.

An answer is digits, spaces and an end: twelve tokens of some 150,000. So the decoder's embedding
and its head have twelve rows, and prompts are embedded by the whole table before it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from deft_policies.checkpoint.fields import JsonFields
from deft_policies.checkpoint.lora import LoraAdapter
from deft_policies.checkpoint.open import check_tensors
from deft_policies.checkpoint.tensor_file import StoredTensor, find_tensors, require_finite
from deft_policies.errors import CheckpointError
from deft_policies.families.vla0.pictures import FRAMES, MERGE, PATCH
from deft_policies.families.vla0.prompt import END
from deft_policies.model.formats import Quantization
from deft_policies.model.llama import LlamaDecoder
from deft_policies.model.qwen_vision import QwenVision, QwenVisionSizes
from deft_policies.model.sizes import LlamaSizes, TrainingNotes
from deft_policies.model.statistics import ActionStatistics
from deft_policies.model.tensor_names import TensorPlace, layer_places
from deft_policies.model.vla import VlaNetwork, allocate

CHARACTERS = "0123456789 "  # of an answer; behind them stands its end
_MOST_POSITIONS = 4096  # more than any prompt and answer have: a table of angles is kept of them
_FRAME_SIZE = 256  # of LIBERO's cameras
_NEW_LAYERS = "model.language_model."  # how names begin since transformers 4.52
HEAD = "decoder.head.weight"
_BIASED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True, eq=False)
class Vla0Config:
    """Sizes of a checkpoint, as its `config.json` tells them."""

    llm: LlamaSizes  # of a decoder that knows twelve tokens
    vision: QwenVisionSizes
    num_words: int  # rows of the whole table
    sections: tuple[int, ...]  # of frequencies, that turn by time, row and column
    is_tied: bool  # the head is the table
    ids: tuple[int, ...]  # of the twelve tokens
    statistics: Mapping[str, ActionStatistics]
    training: TrainingNotes = TrainingNotes()
    frame_size: int = _FRAME_SIZE


def load_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder."""
    path = model / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} cannot be read: {error}; restore it") from error


def find_ids(tokenizer: Tokenizer, model: Path) -> tuple[int, ...]:
    """Ids of the twelve tokens of answers, which must be one token each."""
    found: list[int] = []
    for text in (*CHARACTERS, END):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise CheckpointError(f"{model}: {text!r} is not one token; expected Qwen's tokenizer")
        found += ids
    return tuple(found)


def read_config(
    model: Path, ids: tuple[int, ...], statistics: Mapping[str, ActionStatistics]
) -> Vla0Config:
    """Read `config.json` in either layout: a flat one, or with a section of the decoder."""
    fields = JsonFields.load(model / "config.json", "restore it")
    kind = fields.value("model_type", str)
    if kind != "qwen2_5_vl":
        raise fields.error("model_type", f"is {kind!r}, expected 'qwen2_5_vl'")
    text = fields.section("text_config") if fields.has("text_config") else fields
    if text.value("use_sliding_window", bool, False):
        raise text.error("use_sliding_window", "is true, which is not served")
    rope = text.section("rope_parameters" if text.has("rope_parameters") else "rope_scaling")
    theta = rope if rope.has("rope_theta") else text
    width, num_heads = text.count("hidden_size", 1 << 16), text.count("num_attention_heads", 1024)
    head_dim = text.count("head_dim", 1024, width // num_heads)
    sections = rope.values("mrope_section", int)
    if len(sections) != 3 or 2 * sum(sections) != head_dim or min(sections) < 0:
        raise rope.error("mrope_section", f"must be three numbers of sum {head_dim // 2}")
    llm = LlamaSizes(
        vocabulary=len(ids),
        width=width,
        mlp_width=text.count("intermediate_size", 1 << 20),
        num_layers=text.count("num_hidden_layers", 1024),
        num_heads=num_heads,
        num_kv_heads=text.count("num_key_value_heads", num_heads),
        head_dim=head_dim,
        norm_eps=text.value("rms_norm_eps", float),
        rope_theta=theta.value("rope_theta", float),
        max_positions=min(_MOST_POSITIONS, text.count("max_position_embeddings", 1 << 24)),
        has_qkv_bias=True,
    )
    return Vla0Config(
        llm=llm,
        vision=_read_vision(fields.section("vision_config"), width),
        num_words=text.count("vocab_size", 1 << 24),
        sections=sections,
        is_tied=fields.value("tie_word_embeddings", bool, False),
        ids=ids,
        statistics=statistics,
    )


def _read_vision(fields: JsonFields, out_width: int) -> QwenVisionSizes:
    for name, served in (
        ("patch_size", PATCH),
        ("spatial_merge_size", MERGE),
        ("temporal_patch_size", FRAMES),
        ("out_hidden_size", out_width),
    ):
        if fields.value(name, int) != served:
            raise fields.error(name, f"must be {served}")
    return QwenVisionSizes(
        width=fields.count("hidden_size", 1 << 16),
        mlp_width=fields.count("intermediate_size", 1 << 20),
        num_blocks=fields.count("depth", 1024),
        num_heads=fields.count("num_heads", 1024),
        out_width=out_width,
        patch=PATCH,
        merge=MERGE,
        frames=FRAMES,
        window=fields.count("window_size", 4096),
        full_blocks=frozenset(fields.values("fullatt_block_indexes", int)),
    )


class Vla0Network(VlaNetwork):
    """The modules of a checkpoint."""

    config: Vla0Config

    def __init__(self, config: Vla0Config) -> None:
        super().__init__()
        self.config = config
        self.vision = QwenVision(config.vision)
        width = config.llm.width
        table = torch.empty(config.num_words, width)
        self.words = nn.Embedding(config.num_words, width, _weight=table)
        self.decoder = LlamaDecoder(config.llm)


def find_places(config: Vla0Config, has_new_names: bool) -> tuple[TensorPlace, ...]:
    """Every tensor of a checkpoint; `decoder.head.weight` takes twelve rows of what is stored."""
    layers, vision = (_NEW_LAYERS, "model.visual.") if has_new_names else ("model.", "visual.")
    llm, table = config.llm, (config.num_words, config.llm.width)
    places = [replace(one, name=f"{vision}{one.name}") for one in _vision_places(config.vision)]
    places.append(TensorPlace(f"{layers}embed_tokens.weight", table, "words.weight"))
    for index in range(llm.num_layers):
        for one in layer_places(llm):
            name, ours = f"{layers}layers.{index}.{one.name}", f"decoder.layers.{index}"
            weight = f"{ours}.{one.parameter}.weight"
            places.append(replace(one, name=f"{name}.weight", parameter=weight))
            if one.name in _BIASED:
                bias = f"{ours}.{one.parameter}.bias"
                places.append(TensorPlace(f"{name}.bias", one.shape[:1], bias, one.first_row))
    places.append(TensorPlace(f"{layers}norm.weight", (llm.width,), "decoder.norm.weight"))
    head = None if config.is_tied else HEAD
    return (*places, TensorPlace("lm_head.weight", table, head))


def _places_named_as(names: Collection[str], config: Vla0Config) -> tuple[TensorPlace, ...]:
    return find_places(config, any(one.startswith(_NEW_LAYERS) for one in names))


def _vision_places(sizes: QwenVisionSizes) -> Iterator[TensorPlace]:
    with torch.device("meta"):
        tower = QwenVision(sizes)
    for name, one in tower.named_parameters():
        shape = tuple(one.shape)
        if name == "patch_embed.proj.weight":  # stored as of a convolution
            shape = (sizes.width, 3, sizes.frames, sizes.patch, sizes.patch)
        yield TensorPlace(name, shape, f"vision.{name}")


@dataclass(frozen=True, eq=False)
class Vla0Weights:
    """A checkpoint's tensors, which fit its configuration."""

    config: Vla0Config
    stored: Mapping[str, StoredTensor]
    places: Sequence[TensorPlace]
    adapter: LoraAdapter | None = None
    adapted: Sequence[TensorPlace] = ()  # the same places by the adapter's names

    @staticmethod
    def find(base: Path, config: Vla0Config, adapter: Path | None = None) -> "Vla0Weights":
        """Read the headers of a folder, of one file or of several, and those of an adapter."""
        stored = find_tensors(base)
        places = _places_named_as(stored, config)
        check_tensors(base, {name: one.shape for name, one in stored.items()}, places)
        if adapter is None:
            return Vla0Weights(config, stored, places)
        lora = LoraAdapter(adapter)  # saved by another version than its base, perhaps
        adapted = _places_named_as(lora.targets, config)
        lora.check({one.name: one.shape for one in adapted})
        return Vla0Weights(config, stored, places, lora, adapted)

    @torch.no_grad()
    def load(
        self, device: torch.device, dtype: torch.dtype, quantization: Quantization
    ) -> Vla0Network:
        """Build the network on a device."""
        with torch.device("meta"):
            network = Vla0Network(self.config).to(dtype)
        allocate(network, device)
        parameters = dict(network.named_parameters())
        ids = torch.tensor(self.config.ids, device=device)
        for place, adapted in zip_longest(self.places, self.adapted):
            if place.parameter is None:
                continue
            weight = self.stored[place.name].read(device)
            if self.adapter is not None:
                weight = self.adapter.merge(adapted.name, weight)
            require_finite(place.name, weight, self.stored[place.name].path)
            if place.parameter == HEAD:
                weight = weight[ids]
            rows = parameters[place.parameter][place.first_row :][: len(weight)]
            rows.copy_(weight.view(rows.shape))
        answered = network.words.weight[ids]
        network.decoder.embedding.weight.copy_(answered)
        if self.config.is_tied:
            network.decoder.head.weight.copy_(answered)
        for index in range(self.config.llm.num_layers):
            network.quantize_layer(index, quantization, device)
        return network.eval().requires_grad_(False)
