"""Choosing tokens from logits: the largest, or a draw whose noise is fixed by who asks for it.

Noise has no state: it is a hash of (seed, session, action, position, token). So the same seed,
memory and frame draw the same answer in any process, in any batch and with any drafts, and two
sessions draw independently of each other.
"""

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Draw = tuple[int, int]  # a session's noise number, and which of its actions is decoded
MOST_TRIES = 8  # drafts of one position that the ratio test may look at


def first_maximum(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """Index of the largest value along the last axis; among equals the lowest.

    NumPy's search is vectorised and torch's on a CPU is not: ten times faster over 32,000 columns.
    """
    is_watched = is_in_torch_dispatch_mode()  # what records operations sees nothing of NumPy's
    if logits.device.type == "cpu" and not logits.requires_grad and not is_watched:
        found = torch.from_numpy(np.asarray(np.argmax(logits.numpy(), axis=-1)))
        return found if out is None else out.copy_(found)
    return torch.argmax(logits, dim=-1, out=out)


def top_gap(logits: Tensor, best: Tensor) -> Tensor:
    """How far the largest value along the last axis is above the second; `best` is its index."""
    index = best.unsqueeze(-1)
    others = logits.scatter(-1, index, float("-inf"))
    return logits.gather(-1, index).squeeze(-1) - others.amax(dim=-1)


def target_odds(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """softmax(logits / temperature)."""
    return torch.softmax(logits / temperature, dim=-1)


# What random numbers are drawn for; no two purposes share any.
ANSWER = 0  # the target's tokens
COIN = 1  # whether a draft is accepted
DRAFT = 2  # the tokens of drafts
_NUM_STREAMS = 3

_MOST_TOKENS = 1 << 20  # of a vocabulary
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # splitmix64's constants, as signed numbers
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def uniform(keys: Tensor, stream: int, positions: Tensor, size: int) -> Tensor:
    """Numbers between 0 and 1, float64 [row, position, column].

    Of keys [row] and positions [row, position].

    splitmix64: number n of a row is a hash of its key plus n times a constant.
    """
    columns = torch.arange(size, device=keys.device)
    numbers = (positions * _NUM_STREAMS + stream)[:, :, None] * _MOST_TOKENS + columns
    bits = keys[:, None, None] + numbers * _GAMMA
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    bits = bits ^ _shifted(bits, 31)
    return (_shifted(bits, 11).double() + 0.5) * 2.0**-53


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift to the right, filling with zeros."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def exponential(keys: Tensor, stream: int, positions: Tensor, size: int) -> Tensor:
    """Exponential noise, float32 [row, position, column]: the largest p / noise draws from p."""
    return uniform(keys, stream, positions, size).log_().neg_().float()


def noise_key(seed: int, draw: Draw) -> int:
    """What the noise of an answer is a hash of."""
    high, low = np.random.SeedSequence((seed, *draw)).generate_state(2)
    return int(high) << 31 ^ int(low)
