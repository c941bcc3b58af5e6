"""A small model of VLA-0's architecture: Qwen2.5-VL's vision tower and decoder, with one table."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deft_policies.families.vla0.network import Vla0Config, find_places
from deft_policies.model.llama import LlamaDecoder, MRopeTable
from deft_policies.model.qwen_vision import QwenVision, QwenVisionSizes
from deft_policies.model.sizes import LlamaSizes
from tiny_libero_recipe.model import position_head


@dataclass(frozen=True)
class NumberModelConfig:
    """Sizes of the vision tower and of the decoder."""

    vision_width: int = 96
    vision_blocks: int = 3  # every second one sees the whole picture
    vision_heads: int = 3
    vision_mlp: int = 256
    width: int = 192
    num_layers: int = 8
    heads: int = 6
    kv_heads: int = 2
    mlp: int = 576


# Of the rotary frequencies, one turns by time and three by row. The others turn by column: some of
# them fast enough to tell eight columns apart, and some so slow that far words are found.
_BY_TIME, _BY_ROW, _ROPE_THETA = 1, 3, 10000.0


def build_number_config(
    sizes: NumberModelConfig, num_words: int, ids: tuple[int, ...]
) -> Vla0Config:
    """The configuration of a small model whose tokenizer knows `num_words` ids."""
    head_dim = sizes.width // sizes.heads
    return Vla0Config(
        llm=LlamaSizes(
            vocabulary=num_words,
            width=sizes.width,
            mlp_width=sizes.mlp,
            num_layers=sizes.num_layers,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=head_dim,
            norm_eps=1e-6,
            rope_theta=_ROPE_THETA,
            max_positions=4096,
            has_qkv_bias=True,
        ),
        vision=QwenVisionSizes(
            width=sizes.vision_width,
            mlp_width=sizes.vision_mlp,
            num_blocks=sizes.vision_blocks,
            num_heads=sizes.vision_heads,
            out_width=sizes.width,
            window=112,
            full_blocks=frozenset(range(1, sizes.vision_blocks, 2)),
        ),
        vocab_size=num_words,
        mrope_section=(_BY_TIME, _BY_ROW, head_dim // 2 - _BY_TIME - _BY_ROW),
        is_tied=True,
        answer_ids=ids,
        statistics={},
    )


class NumberNet(nn.Module):
    """The model that is kept, and a head that tells positions from the last prompt state."""

    def __init__(self, config: Vla0Config, places: Tensor, slots: slice, num_values: int) -> None:
        """`places` [3, token] are those of a prompt, `slots` its picture's tokens."""
        super().__init__()
        self.config, self._slots = config, slots
        self.vision = QwenVision(config.vision)
        self.decoder = LlamaDecoder(config.llm)
        self.decoder.head.weight = self.decoder.embedding.weight
        self.decoder.rotary = MRopeTable(config.llm, places, config.mrope_section)
        self.position_head = position_head(config.llm.width, num_values)

    def forward(
        self, patches: Tensor, grid: tuple[int, int], ids: Tensor, lengths: Tensor, steps: int
    ) -> Tensor:
        """Hidden states that predict the answer's tokens, [row, step, width].

        `ids` [row, text] are prompt and answer, right-padded; `lengths` [row] are the prompts'.
        """
        words, seen = self.decoder.embedding(ids), self.vision(patches, grid)
        first, last = self._slots.start, self._slots.stop
        hidden: Tensor = self.decoder(torch.cat((words[:, :first], seen, words[:, last:]), dim=1))
        wanted = (lengths - 1)[:, None] + torch.arange(steps, device=ids.device)
        wanted = wanted.clamp(max=hidden.shape[1] - 1)[..., None]
        return hidden.gather(1, wanted.expand(-1, -1, hidden.shape[-1]))

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Every weight that is kept under its published name."""
        parameters: dict[str, Tensor] = dict(self.named_parameters())
        parameters["embed_tokens.weight"] = self.decoder.embedding.weight
        return {
            place.name: parameters[place.parameter][place.rows]
            for place in find_places(self.config)
            if place.parameter is not None
        }
