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
    """Weights of the terms. `sigma_bins` 0 is plain cross-entropy."""

    sigma_bins: float = 2.0
    gripper_weight: float = 1.5
    position_weight: float = 1.0  # of the auxiliary regression of simulator positions


def soft_tokens(labels: Tensor, vocabulary: int, actions: TokenRange, sigma: float) -> Tensor:
    """Target distributions over the vocabulary, [..., token], peaked at the labels' action tokens.

    p(t) is proportional to exp(-(t - label)^2 / (2 sigma^2)) for action tokens and 0 for all
    others; sigma 0 gives one-hot rows. Neighbouring action tokens are neighbouring bins.
    """
    if sigma <= 0:
        return F.one_hot(labels, vocabulary).float()
    tokens = torch.arange(vocabulary, device=labels.device)
    scores = -0.5 * ((tokens - labels[..., None]) / sigma) ** 2
    return torch.softmax(scores.masked_fill(~actions.contains(tokens), -torch.inf), dim=-1)


def token_loss(
    logits: Tensor,
    labels: Tensor,
    sample_weight: Tensor,
    actions: TokenRange,
    config: PolicyLossConfig,
) -> Tensor:
    """Weighted cross-entropy. `logits` [row, dim, token], `labels` [row, dim], weights [row].

    The gripper, the last dimension, keeps its hard label: its two values are far apart and a
    neighbouring bin means nothing.
    """
    vocabulary = logits.shape[-1]
    soft = soft_tokens(labels[:, :-1], vocabulary, actions, config.sigma_bins)
    hard = F.one_hot(labels[:, -1:], vocabulary).float()
    losses = -(torch.cat([soft, hard], dim=1) * F.log_softmax(logits.float(), dim=-1)).sum(dim=-1)
    dims = torch.ones(losses.shape[1], device=losses.device)
    dims[-1] = config.gripper_weight
    weights = sample_weight[:, None] * dims
    return (losses * weights).sum() / weights.sum()


def position_loss(positions: Tensor, truth: Tensor, sample_weight: Tensor) -> Tensor:
    """Smooth L1 distance of the auxiliary head from the simulator's positions, [row, value]."""
    misses = F.smooth_l1_loss(positions.float(), truth, reduction="none", beta=0.1)
    return (misses.mean(dim=-1) * sample_weight).sum() / sample_weight.sum()
