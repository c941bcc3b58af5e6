"""Answers as VLA-0 writes them: the next steps' actions as numbers from 0 to 1000, in text."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_BINS = 1000
NUM_STEPS = 8  # of an answer
STOP = 10  # in a table: the number has ended, a space or the end of the answer follows
_PLACES = len(str(NUM_BINS)) + 1  # digits of the longest number, and its end


def chunks(actions: NDArray[np.float64]) -> NDArray[np.float64]:
    """The actions of each step and of those after it, [step, NUM_STEPS, dim].

    At an episode's end the last action is repeated.
    """
    ahead = np.arange(len(actions))[:, None] + np.arange(NUM_STEPS)
    return np.asarray(actions[ahead.clip(max=len(actions) - 1)])


def to_numbers(
    values: NDArray[np.float64], lowest: NDArray[np.float64], highest: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Where actions lie between the smallest and the largest, in thousandths, rounded to whole."""
    span = np.where(highest > lowest, highest - lowest, 1.0)
    shares = ((values - lowest) / span).clip(0, 1)
    return np.round(NUM_BINS * shares).astype(np.int64)


def repeated_share(episodes: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Of each dimension, the share of numbers that the next frame's first row has again.

    Each episode's numbers are [step, dim]. Were it large, a draft would be right for free.
    """
    same = [episode[1:] == episode[:-1] for episode in episodes]
    return np.asarray(np.concatenate(same).mean(axis=0))


def spelling_table(sigma: float) -> Tensor:
    """What may follow the digits written so far, [number, place, digit or STOP].

    A number is right, and numbers near it are nearly right: Gaussian weights, spelt digit by digit.
    A row holds what numbers that begin with the same digits go on with. Sigma 0 is the number
    alone. Rows behind a number's end are zero.
    """
    texts = [str(number) for number in range(NUM_BINS + 1)]
    numbers = np.arange(NUM_BINS + 1)
    table = torch.zeros(NUM_BINS + 1, _PLACES, STOP + 1)
    for place in range(_PLACES):
        # By the digits before this place: which numbers have them, and how they go on.
        groups: dict[str, list[int]] = {}
        for number, text in enumerate(texts):
            if len(text) >= place:
                groups.setdefault(text[:place], []).append(number)
        for members in groups.values():
            follow = [
                int(texts[one][place]) if len(texts[one]) > place else STOP for one in members
            ]
            away = numbers[members][:, None] - numbers[members]
            weights = np.exp(-0.5 * (away / sigma) ** 2) if sigma > 0 else 1.0 * (away == 0)
            shares = torch.zeros(len(members), STOP + 1)
            shares.index_add_(1, torch.tensor(follow), torch.tensor(weights, dtype=torch.float32))
            table[members, place] = shares / shares.sum(dim=1, keepdim=True)
    return table
