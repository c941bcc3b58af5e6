"""A small model of pi0-FAST's architecture: SigLIP's tower and Gemma, with one table."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deft_policies.families.pi0fast.network import TABLE, PaliGemma, Pi0FastConfig, find_places
from deft_policies.model.llama import Attention
from deft_policies.model.sizes import LlamaSizes, TowerConfig
from tiny_libero_recipe.model import initialise, position_head

_TOWER = "model.vision_tower.vision_model."
_SIDE, _PATCH, _TOWER_HEADS = 224, 14, 16  # of every pi0-FAST
_GEMMA = "model.language_model."  # its norms, which alone have one axis, are stored less 1


@dataclass(frozen=True)
class FastModelConfig:
    """Sizes of the vision tower and of the decoder."""

    tower_width: int = 96  # a multiple of 16
    tower_blocks: int = 2
    tower_mlp: int = 256
    width: int = 192
    num_layers: int = 8
    heads: int = 6
    mlp: int = 640


def build_fast_config(sizes: FastModelConfig, num_words: int) -> Pi0FastConfig:
    """The configuration of a small model whose tokenizer knows `num_words` ids, codes included."""
    return Pi0FastConfig(
        llm=LlamaSizes(
            vocabulary=num_words,
            width=sizes.width,
            mlp_width=sizes.mlp,
            num_layers=sizes.num_layers,
            num_heads=sizes.heads,
            num_kv_heads=1,
            head_dim=sizes.width // sizes.heads,
            gate="gelu_tanh",
        ),
        tower=TowerConfig(
            is_dino=False,
            prefix=_TOWER,
            width=sizes.tower_width,
            depth=sizes.tower_blocks,
            heads=_TOWER_HEADS,
            mlp=sizes.tower_mlp,
            image_size=_SIDE,
            patch_size=_PATCH,
        ),
        num_rows=num_words,
        stored=(TABLE,),
        answer_ids=(),
        statistics={},
    )


class FastNet(nn.Module):
    """The model that is kept, and a head that tells positions from the last prompt state."""

    def __init__(self, config: Pi0FastConfig, num_values: int) -> None:
        super().__init__()
        self.config = config
        self.network = PaliGemma(config)
        self.network.share_rows()
        self.position_head = position_head(config.llm.width, num_values)

    def forward(
        self, pixels: Tensor, patches: Tensor, ids: Tensor, lengths: Tensor, steps: int
    ) -> Tensor:
        """Hidden states that predict the answer's tokens, [row, step, width].

        `patches` [row, kept] are those that the decoder is shown. `ids` [row, text] are prompt and
        answer, right-padded; `lengths` [row] are the prompts'. What comes before the answer sees
        all of itself, and an answer's token what is before it.
        """
        decoder, num_patches = self.network.decoder, patches.shape[1]
        seen = self.network.see(pixels)
        seen = seen.gather(1, patches[..., None].expand(-1, -1, seen.shape[2]))
        hidden = torch.cat((seen, self.network.words(ids)), dim=1)
        texts = torch.arange(ids.shape[1], device=ids.device) + self.config.tower.num_patches
        positions = torch.cat((patches, texts.expand(len(ids), -1)), dim=1)
        cos, sin = decoder.rotary(positions, hidden)
        mask = prefix_mask(lengths + num_patches, hidden.shape[1])
        attention = Attention(decoder.sizes, cos, sin, mask)
        for layer in decoder.layers:
            hidden = layer(hidden, attention)
        first = lengths - 1 + num_patches
        wanted = first[:, None] + torch.arange(steps, device=ids.device)
        wanted = wanted.clamp(max=hidden.shape[1] - 1)[..., None]
        answered: Tensor = decoder.norm(hidden.gather(1, wanted.expand(-1, -1, hidden.shape[2])))
        return answered

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Every weight that is kept under its published name, as it is stored."""
        parameters = dict(self.network.named_parameters())
        tensors = {}
        for place in find_places(self.config):
            assert place.parameter is not None
            tensor = parameters[place.parameter][place.rows].detach().reshape(place.shape)
            is_norm = place.name.startswith(_GEMMA) and tensor.ndim == 1
            tensors[place.name] = tensor - 1 if is_norm else tensor
        return tensors


def prefix_mask(lengths: Tensor, num_tokens: int) -> Tensor:
    """What sees what, [row, 1, token, token]: `lengths` [row] tokens see each other."""
    slots = torch.arange(num_tokens, device=lengths.device)
    is_before = slots <= slots[:, None]
    return (is_before | (slots < lengths[:, None, None]))[:, None]


@torch.no_grad()
def initialise_fast(net: FastNet, numbers: Tensor, seed: int) -> None:
    """As any policy here, but where things lie in a row or in a grid, near ones begin alike.

    `numbers` are the tokens of the state's numbers, in order.
    """
    initialise(net, seed)
    network, tower = net.network, net.config.tower
    table = network.decoder.embedding.weight
    table[numbers] = waves(len(numbers), table.shape[1], 16) / math.sqrt(table.shape[1])
    side = tower.image_size // tower.patch_size
    half = waves(side, tower.width // 2, 4) / 2
    rows, columns = half.repeat_interleave(side, dim=0), half.repeat(side, 1)
    network.tower.position.copy_(torch.cat((rows, columns), dim=1)[None])


def waves(num: int, width: int, shortest: float) -> Tensor:
    """Sines and cosines of `num` places, [place, width], of waves from `shortest` to 2 * `num`."""
    lengths = torch.logspace(math.log10(2 * num), math.log10(shortest), width // 2)
    angles = 2 * math.pi * torch.arange(num)[:, None] / lengths
    return math.sqrt(2) * torch.cat((angles.sin(), angles.cos()), dim=1)
