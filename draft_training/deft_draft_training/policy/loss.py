"""What a small policy is trained on: soft bins for the tokens, positions for the auxiliary head.

Bins are numbers in order, so a neighbour of the right bin is almost right: the target
distribution is a Gaussian over bins around the label, and its width says how near is near enough.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows it by)
from torch import Tensor

from deft_policies.decoding.vocabulary import TokenRange


@dataclass(frozen=True)
class PolicyLossConfig:
    """Weights of the terms. `sigma_bins` 0 is plain cross-entropy.

    `label_step` above 1 teaches every so many bins only. A small policy cannot tell neighbouring
    bins apart; where it has to choose among few, its choice is clear, and a draft can guess it.
    """

    sigma_bins: float = 2.0
    label_step: int = 1
    gripper_weight: float = 1.5
    position_weight: float = 1.0  # of the auxiliary regression of simulator positions


def taught_tokens(actions: TokenRange, still: Tensor, vocabulary: int, step: int) -> Tensor:
    """Which tokens labels may be, [dim, token]: every `step`-th action token and both ends.

    They are counted from `still`, [dim], the tokens that move nothing: with few bins to choose
    from, too, a policy must be able to stay where it is. The gripper, the last, keeps all its bins.
    """
    tokens = torch.arange(vocabulary, device=still.device)
    is_taught = ((tokens - still[:, None]) % step == 0) | (tokens == actions.first)
    is_taught |= tokens == actions.last
    is_taught[-1] = True
    return is_taught & actions.contains(tokens)


def nearest_taught(labels: Tensor, is_taught: Tensor) -> Tensor:
    """Labels, [row, dim], moved to the nearest tokens that are taught."""
    tokens = torch.arange(is_taught.shape[1], device=labels.device)
    distances = (tokens - labels[..., None]).abs()
    return distances.masked_fill(~is_taught, len(tokens)).argmin(dim=-1)


def soft_tokens(labels: Tensor, is_taught: Tensor, sigma: float) -> Tensor:
    """Target distributions over the vocabulary, [row, dim, token], peaked at the labels.

    p(t) is proportional to exp(-(t - label)^2 / (2 sigma^2)) for taught tokens and 0 for all
    others; sigma 0 gives one-hot rows. Neighbouring action tokens are neighbouring bins.
    """
    vocabulary = is_taught.shape[1]
    if sigma <= 0:
        return F.one_hot(labels, vocabulary).float()
    tokens = torch.arange(vocabulary, device=labels.device)
    scores = -0.5 * ((tokens - labels[..., None]) / sigma) ** 2
    return torch.softmax(scores.masked_fill(~is_taught, -torch.inf), dim=-1)


def token_loss(
    logits: Tensor,
    labels: Tensor,
    sample_weight: Tensor,
    is_taught: Tensor,
    config: PolicyLossConfig,
) -> Tensor:
    """Weighted cross-entropy. `logits` [row, dim, token], `labels` [row, dim], weights [row].

    The gripper, the last dimension, keeps its hard label: its two values are far apart and a
    neighbouring bin means nothing.
    """
    soft = soft_tokens(labels[:, :-1], is_taught[:-1], config.sigma_bins)
    hard = F.one_hot(labels[:, -1:], logits.shape[-1]).float()
    losses = -(torch.cat([soft, hard], dim=1) * F.log_softmax(logits.float(), dim=-1)).sum(dim=-1)
    dims = torch.ones(losses.shape[1], device=losses.device)
    dims[-1] = config.gripper_weight
    weights = sample_weight[:, None] * dims
    return (losses * weights).sum() / weights.sum()


def position_loss(positions: Tensor, truth: Tensor, sample_weight: Tensor) -> Tensor:
    """Smooth L1 distance of the auxiliary head from the simulator's positions, [row, value]."""
    misses = F.smooth_l1_loss(positions.float(), truth, reduction="none", beta=0.1)
    return (misses.mean(dim=-1) * sample_weight).sum() / sample_weight.sum()
