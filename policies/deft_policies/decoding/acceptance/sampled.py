"""Verifying drafts when tokens are drawn instead of taken greedily, without bending the odds.

Two exact ways.

Noise fixed per position (`SampledVerifier`): the target's token after a node is the maximum of
p / E over the vocabulary, E being exponential noise that belongs to the action position, not to the
node. That is an exact draw from p, and it is the same draw whatever was drafted, so the output
equals plain sampling with the same seed token by token. For trees whose guesses were not drawn at
random this is the ratio test itself: a guess survives with probability p(guess), and what replaces
it follows p without the guesses.

Leviathan's ratio test (`RatioVerifier`): for a chain whose tokens were drawn from known odds q, a
draft survives with probability min(1, p / q), and the first that does not is replaced by a draw
from max(0, p - q) / Z.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deft_policies.decoding.acceptance.scored import ScoredTree
from deft_policies.decoding.acceptance.verify import Verdict, Verifier
from deft_policies.decoding.choosing import first_maximum
from deft_policies.decoding.target import Scores
from deft_policies.decoding.tree import DraftTree


class TokenChooser(Protocol):
    """Picks one token per row."""

    def choose(self, logits: Tensor) -> Tensor:
        """Indices [row] into the last axis of [row, vocabulary]."""


class Greedy:
    """The largest logit; among equals the lowest index."""

    def choose(self, logits: Tensor) -> Tensor:
        """Return the first maximum."""
        return first_maximum(logits)


@dataclass(frozen=True)
class Sampling:
    """How a policy draws tokens; a temperature of 0 means greedy."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")

    def chooser(self, draws: Sequence[int], device: torch.device) -> TokenChooser:
        """A chooser for rows that have drawn `draws` actions before, each with its own stream.

        The same seed and the same number of earlier draws give the same noise, whatever else is
        in the batch.
        """
        if self.temperature == 0.0:
            return Greedy()
        generators = []
        for draw in draws:
            generator = torch.Generator(device)
            generator.manual_seed((self.seed * 1_000_003 + draw) % 2**63)
            generators.append(generator)
        return Sampled(self.temperature, tuple(generators))


@dataclass(frozen=True)
class Sampled:
    """Draws from softmax(logits / temperature), one generator per row.

    Dividing probabilities by exponential noise and taking the largest is an exact draw, and needs
    no word with the host.
    """

    temperature: float
    generators: tuple[torch.Generator, ...]

    def choose(self, logits: Tensor) -> Tensor:
        """Draw one index per row."""
        noise = torch.empty_like(logits)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        probabilities = torch.softmax(logits / self.temperature, dim=-1)
        return (probabilities / noise).argmax(dim=-1)


@dataclass(frozen=True)
class SampledChain(DraftTree):
    """A chain whose tokens were drawn at random, with the odds of every draw.

    Column i of `odds` is token `first_token + i`; all other tokens had none.
    """

    odds: Tensor  # [row, node, token] float32; the root's row is unused
    first_token: int


@dataclass(frozen=True)
class SampledVerifier(Verifier):
    """Draws the target's tokens with noise that is fixed per action position."""

    temperature: float
    noise: Tensor  # [row, position, vocabulary]

    def predict(self, tree: DraftTree, scores: Scores, num_committed: Tensor) -> Tensor:
        """Draw after each node, [row, node]."""
        places = num_committed[:, None] + tree.depths()
        places = places.clamp(max=self.noise.shape[1] - 1)
        rows = torch.arange(len(places), device=places.device)[:, None]
        odds = target_odds(scores.logits, self.temperature)
        return (odds / self.noise[rows, places]).argmax(dim=2) + self.first_token


@dataclass(frozen=True)
class RatioVerifier(SampledVerifier):
    """The ratio test for chains that were drawn, fixed noise for every other tree."""

    uniform: Tensor  # [row, position], the coin of each position

    def judge(self, scored: ScoredTree) -> Verdict:
        """Keep drafts while their coins allow, then replace the first that falls."""
        if not isinstance(scored.tree, SampledChain):
            return super().judge(scored)
        p = target_odds(scored.scores.logits, self.temperature)
        q = _over_vocabulary(scored.tree, p.shape[2], self.first_token)
        drafted = (scored.tree.tokens[:, 1:] - self.first_token)[:, :, None]
        p_drafted = p[:, :-1].gather(2, drafted).squeeze(2)
        q_drafted = q[:, 1:].gather(2, drafted).squeeze(2)
        coins = scored.at_positions(self.uniform)[:, 1:]
        deepest = scored.context.space.length - 1 - scored.num_committed
        levels = torch.arange(1, scored.tree.num_nodes, device=coins.device)
        is_judged = (levels <= deepest[:, None]) & scored.tree.is_real[:, 1:]
        stands = ((coins * q_drafted < p_drafted) & is_judged).cummin(dim=1).values
        kept = stands.sum(dim=1)
        bonus = self._replacement(scored, p, q, kept, is_judged)
        path = torch.arange(scored.tree.num_nodes, device=kept.device).expand_as(p[:, :, 0])
        own = torch.cat((scored.tree.tokens[:, 1:], bonus[:, None]), dim=1)
        own = own.scatter(1, kept[:, None], bonus[:, None])
        steps = min(scored.tree.num_nodes, scored.context.space.length)
        return Verdict(path[:, :steps], kept, bonus, own[:, :steps])

    def _replacement(
        self, scored: ScoredTree, p: Tensor, q: Tensor, kept: Tensor, is_judged: Tensor
    ) -> Tensor:
        """Draw the token behind the kept drafts: the residual where one fell, else p."""
        rows = torch.arange(len(kept), device=kept.device)
        p_here = p[rows, kept]
        after = (kept + 1).clamp(max=q.shape[1] - 1)
        residual = (p_here - q[rows, after]).clamp(min=0)
        fell = is_judged.sum(dim=1) > kept
        # Rounding can leave nothing of a residual whose mass is next to nothing; p is then as good.
        has_residual = fell & (residual.sum(dim=1) > 0)
        odds = torch.where(has_residual[:, None], residual, p_here)
        places = (scored.num_committed + kept).clamp(max=self.noise.shape[1] - 1)
        return (odds / self.noise[rows, places]).argmax(dim=1) + self.first_token


def target_odds(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature)."""
    return torch.softmax(logits / temperature, dim=-1)


def position_noise(
    sampling: Sampling, draws: Sequence[int], like: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Exponential noise [row, position, vocabulary] and coins [row, position] of a batch.

    `like` is [vocabulary]; `draws` says how many actions each row has drawn before. The noise is
    the one that plain sampling would use, position after position.
    """
    chooser = sampling.chooser(draws, like.device)
    if isinstance(chooser, Greedy):
        raise ValueError("greedy decoding draws nothing")
    assert isinstance(chooser, Sampled)
    noise = like.new_empty(len(draws), length, like.shape[0])
    coins = like.new_empty(len(draws), length)
    for row, generator in enumerate(chooser.generators):
        for position in range(length):
            noise[row, position].exponential_(generator=generator)
        coins[row].uniform_(generator=generator)
    return noise, coins


def _over_vocabulary(chain: SampledChain, size: int, first_token: int) -> Tensor:
    """The odds of the draws over the target's vocabulary, [row, node, vocabulary]."""
    start = chain.first_token - first_token
    odds = chain.odds.new_zeros(*chain.odds.shape[:2], size)
    odds[:, :, start : start + chain.odds.shape[2]] = chain.odds
    return odds
