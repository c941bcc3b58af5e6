"""What a block head is trained on. With p_k the weight exp(-k / decay) of place k:

    cross_entropy  -log draft(token)                    say what the target said
    distance       sum_v |draft_v - target_v|           one minus half of it is the chance that a
                                                        draft drawn by the head is accepted
    chance         of the confidence head, that the head's likeliest token is the target's: that is
                   what greedy verification asks

All are means over the places of all blocks that have a token in the answer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deft_draft_training.heads.states import StatesBatch
from deft_policies.model.block_head import BlockHead


@dataclass(frozen=True)
class BlockLossConfig:
    """Weights of the terms; the defaults are DSpark's."""

    cross_entropy: float = 0.1
    distance: float = 0.9
    chance: float = 1.0
    decay: float = 4.0


def block_losses(
    head: BlockHead,
    embed: Callable[[Tensor], Tensor],
    logits: Callable[[Tensor], Tensor],
    batch: StatesBatch,
    config: BlockLossConfig,
) -> dict[str, Tensor]:
    """`logits` is the target's own head over the tokens that the block head drafts."""
    tokens = head.sizes.tokens
    hidden = head(batch.states, embed(batch.first).float(), batch.anchors)
    embeds = head.previous_embeds(batch.before)
    log_draft = (logits(hidden).float() + head.markov(embeds).float()).log_softmax(dim=-1)
    with torch.no_grad():
        final = batch.states[..., -head.width :]
        index = batch.says.flatten(1)[:, :, None].expand(-1, -1, head.width)
        truth = logits(final.gather(1, index).view(*batch.says.shape, -1)).float().softmax(dim=-1)
    counts = batch.counts & tokens.contains(batch.wanted)
    places = torch.arange(head.sizes.places, device=counts.device)
    weight = counts * torch.exp(-places / config.decay)
    total = weight.sum().clamp(min=1e-9)

    def mean(values: Tensor) -> Tensor:
        return (values * weight).sum() / total

    column = torch.where(counts, batch.wanted - tokens.first, 0)
    cross_entropy = mean(-log_draft.gather(3, column[..., None])[..., 0])
    distance = mean((log_draft.exp() - truth).abs().sum(dim=-1))
    agrees = (log_draft.detach().argmax(dim=-1) == column).float()
    chance = head.chances(hidden.detach(), embeds.detach())
    chance = mean(F.binary_cross_entropy_with_logits(chance, agrees, reduction="none"))
    return {
        "loss": config.cross_entropy * cross_entropy
        + config.distance * distance
        + config.chance * chance,
        "cross_entropy": cross_entropy,
        "distance": distance,
        "chance": chance,
        "agreement": (agrees * counts).sum() / counts.sum().clamp(min=1),
        "length": _length(agrees, counts),
    }


def _length(agrees: Tensor, counts: Tensor) -> Tensor:
    """Tokens that a block commits on average, the bonus included."""
    standing = (agrees * counts).cumprod(dim=-1).sum(dim=-1) + 1
    is_there = counts.any(dim=-1)
    return (standing * is_there).sum() / is_there.sum().clamp(min=1)
