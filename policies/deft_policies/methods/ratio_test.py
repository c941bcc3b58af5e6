"""Ratio test (Leviathan et al. 2023): sampling that is exact in distribution.

With p the target's odds and q those by which a draft was drawn, a draft is accepted with
probability min(1, p / q). One that falls leaves max(0, p - q) / Z, by which its next sibling is
judged or the bonus is drawn. So tokens have exactly the target's distribution, in trees as in
chains.

Drafts: a chain of 5 of the head, drawn at random at the temperature of the answer. The small model
drafts with `drafts=small-model`.

`lossless` samples exactly, too, and gives the very tokens of plain sampling with the same seed;
the ratio test gives others, and accepts more drafts.

Left out: a chain whose length follows the acceptance rate, and sampling from the likeliest tokens
alone (top-k, top-p), which no method has here.

Numbers: none: robots decode greedily.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deft_policies.decoding.acceptance.rule import ChoosingRule
from deft_policies.decoding.plan import TreeShape, plan

if TYPE_CHECKING:
    from torch import Tensor

    from deft_policies.decoding.sequence import Sequence
    from deft_policies.decoding.tree import DraftTree


@dataclass(frozen=True)
class RatioTest(ChoosingRule):
    """d is accepted with probability min(1, p(d) / q(d)); see `ratio_test`."""

    def choose(self, sequence: Sequence, tree: DraftTree, logits: Tensor) -> Tensor:
        """The last node and the bonus."""
        return ratio_test(sequence, tree, logits)


def ratio_test(sequence: Sequence, tree: DraftTree, logits: Tensor) -> Tensor:
    """The last node to commit and the bonus, [2].

    Walk down from the root. A draft is accepted with probability min(1, odds / q); `odds` begin as
    the target's p. One that falls leaves max(0, odds - q) / Z to judge its next sibling by, or to
    draw the bonus from. So the tokens have exactly the target's distribution, in trees as in
    chains. A stop token that is accepted is the bonus.

    No step reads from the device: whatever happens there is a tensor of one number.
    """
    import torch

    from deft_policies.decoding.sampling import (
        ANSWER,
        COIN,
        MOST_TRIES,
        exponential,
        target_odds,
        uniform,
    )
    from deft_policies.model.staging import to_device

    q, temperature, device = tree.odds, sequence.method.temperature, logits.device
    assert q is not None
    p = target_odds(logits, temperature)
    keys = to_device([sequence.noise_key], device, torch.int64)
    at = torch.full((), tree.root, device=device)
    depth, tries = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
    ended = torch.zeros((), dtype=torch.bool, device=device)
    odds, depths = p[tree.root], tree.depths()
    for node in range(tree.root + 1, tree.num_nodes):
        token, drawn_by = tree.tokens[node], q[node - tree.root - 1]
        positions = (sequence.count + depth).view(1, 1)
        coins = uniform(keys, COIN, positions, MOST_TRIES).float()[0, 0]
        coin = coins.gather(0, tries.clamp(max=MOST_TRIES - 1)[None])[0]
        is_judged = depths[node] - tree.root <= sequence.room
        is_tried = (at == tree.parents[node]) & (tries < MOST_TRIES) & ~ended & is_judged
        accepted = is_tried & (coin * drawn_by[token] < odds[token])
        if sequence.spec.ends_with(token):
            only = torch.zeros_like(odds)
            only[token] = 1.0
            odds = torch.where(accepted, only, odds)
            ended = ended | accepted
            accepted = torch.zeros_like(accepted)
        remaining = _without_draft(odds, drawn_by)
        odds = torch.where(is_tried & ~accepted & ~ended, remaining, odds)
        odds = torch.where(accepted, p[node], odds)
        at = torch.where(accepted, node, at)
        depth = depth + accepted
        tries = torch.where(accepted, 0, tries + is_tried)
    noise = exponential(keys, ANSWER, (sequence.count + depth).view(1, 1), p.shape[1])[0, 0]
    bonus = (odds / noise).argmax()
    return torch.stack((at, bonus))


def _without_draft(odds: Tensor, q: Tensor) -> Tensor:
    """What is left of the target's odds when a draft drawn by q has fallen, [token]."""
    residual = (odds - q).clamp(min=0)
    mass = residual.sum()
    # Rounding can leave nothing of a residual whose mass is next to nothing; the odds are as good.
    return (residual / mass).where(mass > 0, odds)


METHODS = {"ratio-test": "autoregressive:rule=ratio-test,plans=ratio-test,temperature=1"}
RULES = {"ratio-test": RatioTest}
PLANS = {"ratio-test": (plan("drawn-chain", "", "head", TreeShape.chain(5)),)}
