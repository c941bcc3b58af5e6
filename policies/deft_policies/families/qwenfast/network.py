"""Qwen2.5-VL that answers with any of its words: the same modules as VLA-0's, with a whole head."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from deft_policies.checkpoint.tensor_file import StoredTensor
from deft_policies.errors import CheckpointError
from deft_policies.families.vla0 import network as vla0
from deft_policies.model.llama import LlamaDecoder
from deft_policies.model.qwen_vision import QwenVision
from deft_policies.model.statistics import ActionStatistics
from deft_policies.model.tensor_names import TensorPlace
from deft_policies.model.vla import VlaNetwork

SIDE = 224  # pixels of a picture's side
_TABLE = "model.language_model.embed_tokens.weight"
_MOST_ROWS = 1 << 20


def read_config(
    base: Path, stored: Mapping[str, StoredTensor], statistics: Mapping[str, ActionStatistics]
) -> vla0.Vla0Config:
    """Sizes by `config.json`, but for the words, which training has added to: by the table."""
    table = stored.get(_TABLE)
    rows = table.shape[0] if table is not None and table.shape else 0
    if not 0 < rows <= _MOST_ROWS:
        raise CheckpointError(f"the weights of {base.name} have no table of words, or no usual one")
    config = vla0.read_config(base, (), statistics)
    llm = replace(config.llm, vocabulary=rows)
    return replace(config, llm=llm, vocab_size=rows, frame_size=SIDE)


def find_places(config: vla0.Vla0Config) -> Sequence[TensorPlace]:
    """Every tensor of a checkpoint."""
    ours = {"embed_tokens.weight": "decoder.embedding.weight"}
    places = vla0.find_places(config)
    return [
        replace(place, parameter=ours.get(place.parameter or "", place.parameter))
        for place in places
    ]


class QwenFastNetwork(VlaNetwork):
    """The modules of a checkpoint."""

    config: vla0.Vla0Config

    def __init__(self, config: vla0.Vla0Config) -> None:
        super().__init__()
        self.config = config
        self.vision = QwenVision(config.vision)
        self.decoder = LlamaDecoder(config.llm)
        self.tie()

    def tie(self) -> None:
        """Where the head is the table, let it take no memory of its own."""
        if self.config.is_tied:
            self.decoder.head.weight = self.decoder.embedding.weight

    @property
    def table(self) -> nn.Embedding:
        """Of words."""
        return self.decoder.embedding


def check_head(config: vla0.Vla0Config, stored: Mapping[str, StoredTensor]) -> None:
    """Raise `CheckpointError` where a head is stored that should be the table and is not."""
    head = stored.get(vla0.HEAD)
    if config.is_tied and head is not None and not torch.equal(head.read(), stored[_TABLE].read()):
        raise CheckpointError(
            f"{head.path} has a head of its own, and tie_word_embeddings says that it is the table "
            "of words; restore the config.json and weights of one and the same model"
        )
