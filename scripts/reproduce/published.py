"""What the tables of Spec-VLA say, and what a loop would show for given chances of acceptance.

Position p of its Table 3 (0 to 5) is a pass that starts with p + 1 tokens known, so that its first
draft stands for token p + 2 of 7; lengths leave the bonus out.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

ACTION_LENGTH = 7
LEVELS = 5
PUBLISHED_BEHIND = 1  # tokens that the published loop decodes behind an action
# Table 2, strict rows: share of passes by accepted length 0..5.
PUBLISHED_SHARES: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "libero_goal": (0.5024, 0.3328, 0.1396, 0.0223, 0.0019, 0.0),
        "libero_object": (0.4793, 0.3472, 0.1272, 0.0407, 0.0056, 0.0),
        "libero_spatial": (0.5596, 0.3152, 0.0990, 0.0246, 0.0016, 0.0),
        "libero_10": (0.5508, 0.2877, 0.1130, 0.0430, 0.0050, 0.0005),
    }
)
# Table 2, relaxed, LIBERO-Goal.
RELAXED_GOAL = (0.2301, 0.1898, 0.3999, 0.1541, 0.0253, 0.0008)
_PER_CENT_SQUARED = 1e4  # so that the fit does not end at once, with losses near zero


def predicted_shares(chances: Sequence[float], num_behind: int) -> tuple[float, ...]:
    """Share of checked passes that accept 0..5 drafts, where a draft of token t stands by chance.

    `chances` are those of tokens 2 to 7, of drafts whose path has stood so far; `num_behind` tokens
    are decoded behind an action.
    """
    shares: list[float] = _shares(torch.tensor(chances, dtype=torch.float64), num_behind).tolist()
    return tuple(shares)


def fit_acceptance(shares: Sequence[float], num_behind: int) -> tuple[tuple[float, ...], float]:
    """Chances of tokens 2 to 7 under which a loop shows these shares; the largest deviation."""
    wanted = torch.tensor(shares, dtype=torch.float64)
    # Unequal at first: from equal chances nothing but rounding would part them.
    start = torch.linspace(0.5, -0.5, ACTION_LENGTH - 1, dtype=torch.float64)
    logits = start.requires_grad_(True)
    optimizer = torch.optim.LBFGS([logits], max_iter=200, line_search_fn="strong_wolfe")

    def misfit() -> Tensor:
        optimizer.zero_grad()
        loss = _PER_CENT_SQUARED * (_shares(logits.sigmoid(), num_behind) - wanted).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(misfit)  # type: ignore[no-untyped-call]
    chances = logits.detach().sigmoid()
    deviation = float((_shares(chances, num_behind) - wanted).abs().max())
    return tuple(chances.tolist()), deviation


def _shares(chances: Tensor, num_behind: int) -> Tensor:
    """Walk over the tokens known before a pass; every pass adds to the histogram."""
    length = ACTION_LENGTH + num_behind
    known = [chances.new_zeros(()) for _ in range(length + 1)]
    known[1] = chances.new_ones(())
    counted = [chances.new_zeros(()) for _ in range(LEVELS + 1)]
    for start in range(1, length):
        alive = known[start]
        for accepted in range(LEVELS + 1):
            place = start + accepted  # of the next draft, counted from 0
            is_over = accepted == LEVELS or place >= length - 1
            stays = chances.new_zeros(()) if is_over else chances[place - 1]
            ends = alive * (1 - stays)
            counted[accepted] = counted[accepted] + ends
            after = min(place + 1, length)
            known[after] = known[after] + ends
            alive = alive * stays
    every = torch.stack(counted)
    return every / every.sum()
