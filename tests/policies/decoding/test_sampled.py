"""Sampling with drafts leaves the target's odds as they are, and plain sampling's very tokens."""

from dataclasses import replace

import pytest
import torch

from deft_policies.decoding.acceptance.rule import (
    ActionContext,
    ActionSpace,
    ExactMatch,
    ScoredTree,
    SpaceTensors,
)
from deft_policies.decoding.autoregressive import AutoregressiveDecoder
from deft_policies.decoding.decoder import DraftModels, build_decoder
from deft_policies.decoding.drafts.eagle import EagleHead, HeadSizes
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.plan import DraftKind
from deft_policies.decoding.sampling import Sampling, target_odds
from deft_policies.decoding.target import Scores
from deft_policies.decoding.tree import DraftTree, DrawnOdds, TokenRange
from deft_policies.decoding.verify import SampledVerifier, TieBreak
from deft_policies.errors import RequestError
from tests.policies.decoding.scripts import Session, clock, tokens_of
from tests.tiny_target import (
    CPU,
    LENGTH,
    WIDTH,
    fast_target,
    random_prompts,
    tiny_decoder,
)

NUM_DRAWS = 20_000
NUM_TOKENS = 12
# The 99.9% quantiles of chi-square for 11 and for 9 * 11 degrees of freedom.
BOUND_11 = 31.26
BOUND_99 = 148.23


def chi_square(counts: torch.Tensor, odds: torch.Tensor) -> float:
    expected = odds * counts.sum()
    return float(((counts - expected).square() / expected).sum())


def counted(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens, minlength=NUM_TOKENS).double()


def logits_and_draft_logits() -> tuple[torch.Tensor, torch.Tensor]:
    """A target's logits at the root and after each token, and a draft's that differ from them."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(NUM_TOKENS + 1, NUM_TOKENS, generator=generator)
    draft = target + 0.8 * torch.randn(NUM_TOKENS + 1, NUM_TOKENS, generator=generator)
    return target, draft


def scored_chains(tokens: torch.Tensor, odds: torch.Tensor | None) -> ScoredTree:
    """Two-token chains below a root, judged by the fixed target: [row, node]."""
    target, _ = logits_and_draft_logits()
    num_rows = len(tokens)
    every = torch.cat((torch.zeros(num_rows, 1, dtype=torch.int64), tokens), dim=1)
    places = torch.arange(3).expand(num_rows, -1)
    fields = (every, places - 1, places >= 0, torch.zeros(num_rows, 3), places)
    tree = DraftTree(*fields, drawn=None if odds is None else DrawnOdds(odds, 0))
    contexts = torch.cat((torch.full((num_rows, 1), NUM_TOKENS), tokens), dim=1)
    logits = target[contexts]
    space = SpaceTensors.of([ActionSpace.in_bins(3)], CPU)
    wide = SpaceTensors(
        space.groups.expand(num_rows, -1),
        space.unit_per_bin.expand(num_rows, -1),
        space.class_boundary.expand(num_rows, -1),
    )
    zero = torch.zeros(num_rows, dtype=torch.int64)
    return ScoredTree(
        tree=tree,
        scores=Scores(logits, logits),
        predictions=logits.argmax(dim=2),
        num_committed=zero,
        spent=torch.zeros(num_rows, 3, dtype=torch.int64),
        vocabulary=TokenRange(0, NUM_TOKENS - 1),
        action_tokens=TokenRange(0, NUM_TOKENS - 1),
        context=ActionContext(wide, torch.zeros(num_rows, 3), zero),
    )


def verifier(temperature: float, num_rows: int, seed: int) -> SampledVerifier:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.empty(num_rows, 3, NUM_TOKENS).exponential_(generator=generator)
    coins = torch.rand(num_rows, 3, generator=generator)
    return SampledVerifier(ExactMatch(), TieBreak.CLOSEST, 0, temperature, noise, coins)


def outputs(scored: ScoredTree, judge: SampledVerifier) -> torch.Tensor:
    """The first two tokens that each row emits; -1 where a pass ended before the second."""
    predicted = judge.predict(scored.tree, scored.scores, scored.num_committed)
    accepted = judge.judge(replace(scored, predictions=predicted))
    kept = accepted.num_accepted
    first = torch.where(kept > 0, scored.tree.tokens[:, 1], accepted.bonus)
    second = torch.where(kept > 1, scored.tree.tokens[:, 2], accepted.bonus)
    return torch.stack((first, torch.where(kept > 0, second, -1)), dim=1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_the_ratio_test_keeps_the_targets_odds(temperature: float) -> None:
    """20,000 chains drawn from q: first tokens follow p, and second ones p given the first."""
    target, draft = logits_and_draft_logits()
    q = target_odds(draft, temperature)
    generator = torch.Generator().manual_seed(11)
    first = torch.multinomial(q[NUM_TOKENS], NUM_DRAWS, replacement=True, generator=generator)
    second = torch.multinomial(q[first], 1, generator=generator).squeeze(1)
    odds = torch.stack((q[first] * 0, q[NUM_TOKENS].expand(NUM_DRAWS, -1), q[first]), dim=1)
    scored = scored_chains(torch.stack((first, second), dim=1), odds)
    found = outputs(scored, verifier(temperature, NUM_DRAWS, seed=5))
    p = target_odds(target, temperature).double()
    assert chi_square(counted(found[:, 0]), p[NUM_TOKENS]) < BOUND_11
    # The draft alone is far off, so the test has something to correct.
    assert chi_square(counted(first), p[NUM_TOKENS]) > 10 * BOUND_11
    likely = p[NUM_TOKENS].argsort(descending=True)[:9].tolist()
    pooled = sum(
        chi_square(counted(found[(found[:, 0] == one) & (found[:, 1] >= 0), 1]), p[one])
        for one in likely
    )
    assert pooled < BOUND_99


def test_a_residual_that_is_not_resampled_is_noticed() -> None:
    """The same check fails when a rejected draft is replaced by a draw from p itself."""

    class WithoutResidual(SampledVerifier):
        def _replacement(
            self,
            scored: ScoredTree,
            p: torch.Tensor,
            q: torch.Tensor,
            kept: torch.Tensor,
            is_judged: torch.Tensor,
        ) -> torch.Tensor:
            return super()._replacement(scored, p, q * 0, kept, is_judged)

    target, draft = logits_and_draft_logits()
    q = target_odds(draft, 1.0)
    generator = torch.Generator().manual_seed(11)
    first = torch.multinomial(q[NUM_TOKENS], NUM_DRAWS, replacement=True, generator=generator)
    odds = torch.stack((q[first] * 0, q[NUM_TOKENS].expand(NUM_DRAWS, -1), q[first]), dim=1)
    scored = scored_chains(torch.stack((first, first), dim=1), odds)
    right = verifier(1.0, NUM_DRAWS, seed=5)
    broken = WithoutResidual(
        right.rule, right.tie_break, 0, right.temperature, right.noise, right.coins
    )
    p = target_odds(target, 1.0).double()
    assert chi_square(counted(outputs(scored, broken)[:, 0]), p[NUM_TOKENS]) > BOUND_11


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_fixed_guesses_keep_the_targets_odds(temperature: float) -> None:
    """A tree of guesses that nobody drew: the same chain in every row, as memory drafts are."""
    target, _ = logits_and_draft_logits()
    chain = torch.tensor([[4, 7]]).expand(NUM_DRAWS, -1)
    found = outputs(scored_chains(chain, None), verifier(temperature, NUM_DRAWS, seed=6))
    p = target_odds(target, temperature).double()
    assert chi_square(counted(found[:, 0]), p[NUM_TOKENS]) < BOUND_11
    behind = found[(found[:, 0] == 4) & (found[:, 1] >= 0), 1]
    assert len(behind) > 100
    assert chi_square(counted(behind), p[4]) < BOUND_11


@pytest.mark.parametrize(
    "drafts",
    [
        (DraftKind.PREVIOUS,),
        (DraftKind.HEAD,),
        (DraftKind.EXTRAPOLATION, DraftKind.NGRAM, DraftKind.RECYCLED, DraftKind.HEAD),
    ],
)
def test_drafted_sampling_draws_the_tokens_of_plain_sampling(drafts: tuple[DraftKind, ...]) -> None:
    """Noise belongs to the position, so drafts change how many passes it takes and nothing else."""
    decoder = tiny_decoder()
    target = fast_target(decoder)
    torch.manual_seed(0)
    head = EagleHead(HeadSizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False)
    sampling = Sampling(temperature=0.7, seed=9)
    method = find_method("lossless").with_drafts(drafts).with_sampling(sampling)
    drafted = build_decoder(target, method, DraftModels(head=head))
    session = Session.of(3)
    saved = 0
    for step in range(6):
        prompts = random_prompts(decoder, [2, 5, 3], seed=step // 3)
        chooser = sampling.chooser([step] * 3, CPU)
        plain = AutoregressiveDecoder(target, chooser).decode(prompts, LENGTH, clock())
        traces = drafted.decode(prompts, session.rows, clock())
        assert tokens_of(traces) == tokens_of(plain)
        saved += sum(LENGTH - trace.num_passes for trace in traces)
    assert saved > 0 or drafts == (DraftKind.HEAD,)


def test_drawn_chains_run_end_to_end_and_repeat_with_their_seed() -> None:
    decoder = tiny_decoder()
    target = fast_target(decoder)
    torch.manual_seed(0)
    head = EagleHead(HeadSizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False)
    prompts = random_prompts(decoder, [2, 5])
    runs = []
    for seed in (1, 1, 2):
        method = find_method("ratio-test").with_sampling(Sampling(3.0, seed))
        drawn = build_decoder(target, method, DraftModels(head=head))
        session = Session.of(2)
        traces = [drawn.decode(prompts, session.rows, clock()) for _ in range(4)]
        runs.append([tokens_of(one) for one in traces])
        assert any(trace.accepted_lengths != (0,) * 7 for one in traces for trace in one)
        assert all(trace.relaxed_share == 0 for one in traces for trace in one)
    assert runs[0] == runs[1] != runs[2]


def test_relaxed_methods_refuse_to_sample() -> None:
    with pytest.raises(RequestError, match="cannot sample"):
        find_method("deft").with_sampling(Sampling(0.5))
