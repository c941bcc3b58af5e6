"""Qwen2.5-VL as VLA-0 uses it: the vision tower, the table of words and a decoder of numbers.

An answer is digits, spaces and an end: twelve tokens of some 150,000. So the decoder's embedding
and its head have twelve rows, and prompts are embedded by the whole table before it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from deft_policies.checkpoint.config import load_training
from deft_policies.checkpoint.fields import JsonFields
from deft_policies.errors import CheckpointError
from deft_policies.families.vla0.prompt import END
from deft_policies.model.llama import LlamaDecoder
from deft_policies.model.qwen_vision import FRAMES, MERGE, PATCH, QwenVision, QwenVisionSizes
from deft_policies.model.sizes import LlamaSizes, TrainingNotes
from deft_policies.model.statistics import ActionStatistics
from deft_policies.model.tensor_names import TensorPlace, layer_places
from deft_policies.model.vla import VlaNetwork

CHARACTERS = "0123456789 "  # of an answer; its end comes behind them
_MOST_POSITIONS = 4096  # more than any prompt and answer have: a table of angles is kept of them
_LAYERS = "model.language_model."  # how names of the decoder's tensors begin
HEAD = "lm_head.weight"
_BIASED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True, eq=False)
class Vla0Config:
    """Sizes of a checkpoint, as its `config.json` tells them."""

    llm: LlamaSizes  # of a decoder that knows twelve tokens
    vision: QwenVisionSizes
    vocab_size: int  # of the tokenizer, padding included
    mrope_section: tuple[int, ...]  # of frequencies, that turn by time, row and column
    is_tied: bool  # the head is the table
    answer_ids: tuple[int, ...]  # of the twelve tokens
    statistics: Mapping[str, ActionStatistics]
    training: TrainingNotes = TrainingNotes()
    frame_size: int = 256  # of LIBERO's cameras


def find_ids(tokenizer: Tokenizer, model: Path) -> tuple[int, ...]:
    """Ids of the twelve tokens of answers, which must be one token each."""
    all_ids: list[int] = []
    for text in (*CHARACTERS, END):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise CheckpointError(f"{model}: {text!r} is not one token; expected Qwen's tokenizer")
        all_ids += ids
    return tuple(all_ids)


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
    mrope_section = rope.values("mrope_section", int)
    if len(mrope_section) != 3 or 2 * sum(mrope_section) != head_dim or min(mrope_section) < 0:
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
        vocab_size=text.count("vocab_size", 1 << 24),
        mrope_section=mrope_section,
        is_tied=fields.value("tie_word_embeddings", bool, False),
        answer_ids=ids,
        statistics=statistics,
        training=load_training(model),
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
        table = torch.empty(config.vocab_size, width)
        self.embed_tokens = nn.Embedding(config.vocab_size, width, _weight=table)
        self.decoder = LlamaDecoder(config.llm)

    def take_answer_rows(self) -> None:
        """Give the decoder the twelve rows of the table that it knows."""
        rows = self.embed_tokens.weight[list(self.config.answer_ids)]
        self.decoder.embedding.weight.copy_(rows)
        if self.config.is_tied:
            self.decoder.head.weight.copy_(rows)


def find_places(config: Vla0Config) -> tuple[TensorPlace, ...]:
    """Every tensor of a checkpoint; `decoder.head.weight` takes twelve rows of what is stored."""
    llm, table = config.llm, (config.vocab_size, config.llm.width)
    with torch.device("meta"):
        vision = QwenVision(config.vision).named_parameters()
    places = [
        TensorPlace(f"model.visual.{name}", tuple(one.shape), f"vision.{name}")
        for name, one in vision
    ]
    places.append(TensorPlace(f"{_LAYERS}embed_tokens.weight", table, "embed_tokens.weight"))
    for index in range(llm.num_layers):
        for place in layer_places(llm):
            name, ours = f"{_LAYERS}layers.{index}.{place.name}", f"decoder.layers.{index}"
            weight = f"{ours}.{place.parameter}.weight"
            places.append(replace(place, name=f"{name}.weight", parameter=weight))
            if place.name in _BIASED:
                bias = f"{ours}.{place.parameter}.bias"
                places.append(TensorPlace(f"{name}.bias", place.shape[:1], bias, place.first_row))
    places.append(TensorPlace(f"{_LAYERS}norm.weight", (llm.width,), "decoder.norm.weight"))
    head = None if config.is_tied else "decoder.head.weight"
    return (*places, TensorPlace(HEAD, table, head))


def new_name(name: str) -> str:
    """A tensor's name since transformers 4.52, whichever version has saved it."""
    name = re.sub(r"^(?=visual\.)", "model.", name)
    return re.sub(r"^model\.(?=embed_tokens\.|layers\.|norm\.)", _LAYERS, name)
