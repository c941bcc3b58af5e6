"""Sampling with drafts leaves the target's odds as they are, and plain sampling's very tokens."""

from functools import cache

import pytest
import torch

from deft_policies.decoding import kinds
from deft_policies.decoding.accept import accept
from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.plan import TreeShape
from deft_policies.decoding.planner import DraftModels
from deft_policies.decoding.read import draw_tokens
from deft_policies.decoding.sampling import (
    ANSWER,
    COIN,
    DRAFT,
    exponential,
    noise_key,
    target_odds,
    uniform,
)
from deft_policies.decoding.sequence import AnswerSpec, PassResult
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.tree import Branches, DraftTree, merge
from deft_policies.errors import RequestError
from deft_policies.memory import SessionMemory
from deft_policies.methods import ratio_test as testing
from deft_policies.methods.ratio_test import ratio_test
from deft_policies.model.draft_heads import EagleHead, head_sizes
from deft_policies.model.llama import LlamaDecoder, first_layers
from tests.draws import draws
from tests.policies.decoding.scripts import Decoding, Session, tokens_of
from tests.tiny_target import (
    LENGTH,
    WIDTH,
    fast_target,
    next_token,
    random_prompts,
    tiny_decoder,
)

NUM_DRAWS = 4_000
NUM_TOKENS = 12
# Three drafts of the next token, two behind the first of them, one behind that.
TREE = TreeShape.of_paths(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
# The 99.9% quantiles of chi-square for 11 and for 9 * 11 degrees of freedom.
BOUND_11 = 31.26
BOUND_99 = 148.23


def chi_square(counts: torch.Tensor, odds: torch.Tensor) -> float:
    expected = odds * counts.sum()
    return float(((counts - expected).square() / expected).sum())


def counted(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens, minlength=NUM_TOKENS).double()


@cache
def logits_and_draft_logits() -> tuple[torch.Tensor, torch.Tensor]:
    """A target's logits at the root and after each token, and a draft's that differ from them."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(NUM_TOKENS + 1, NUM_TOKENS, generator=generator)
    draft = target + 0.8 * torch.randn(NUM_TOKENS + 1, NUM_TOKENS, generator=generator)
    return target, draft


def answers_of(temperature: float, seed: int, num: int = NUM_DRAWS) -> list[Answer]:
    """Answers at a temperature, with noise of their own, that lack three tokens."""
    method = find_method("ratio-test").with_sampling(temperature)
    found = []
    for number in range(num):
        answer = Answer(method, AnswerSpec.action(ActionSpace.in_bins(4)))
        answer.limit, answer.noise_key = 4, number * 7919 + seed * 1_000_003
        found.append(answer)
    return found


def chain_of(tokens: list[int], odds: torch.Tensor | None) -> DraftTree:
    """A chain below a root, and the odds [guess, token] by which it was drawn."""
    count = len(tokens)
    guesses = Branches(tokens, list(range(count)), odds=odds)
    return merge([0], [("test", guesses)], 64)


def logits_along(tokens: list[int]) -> torch.Tensor:
    """What the fixed target says after the root and after each token, [node, token]."""
    target, _ = logits_and_draft_logits()
    return target[[NUM_TOKENS, *tokens]]


def judged(answer: Answer, tree: DraftTree, logits: torch.Tensor) -> tuple[list[int], int]:
    """The path of the ratio test, or by equality with drawn tokens, and the bonus."""
    if tree.odds is not None:
        node, bonus = ratio_test(answer, tree, logits).tolist()
        return tree.path_to(node), bonus
    said = draw_tokens(answer, tree, logits).tolist()
    return accept(answer, tree, PassResult(answer.number, said, said, is_finite=True))


def first_two(path: list[int], bonus: int, tree: DraftTree) -> tuple[int, int]:
    """The first two tokens that a pass emits; -1 where it ended before the second."""
    emitted = [*(tree.tokens[node] for node in path[1:]), bonus, -1]
    return emitted[0], emitted[1]


def outputs(
    chains: list[list[int]], odds: list[torch.Tensor] | None, temperature: float, seed: int
) -> torch.Tensor:
    found = []
    for index, answer in enumerate(answers_of(temperature, seed, len(chains))):
        tree = chain_of(chains[index], None if odds is None else odds[index])
        path, bonus = judged(answer, tree, logits_along(chains[index]))
        found.append(first_two(path, bonus, tree))
    return torch.tensor(found)


def drawn_chains(q: torch.Tensor) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Chains of two tokens drawn from q, and the odds of each."""
    generator = torch.Generator().manual_seed(11)
    first = torch.multinomial(q[NUM_TOKENS], NUM_DRAWS, replacement=True, generator=generator)
    second = torch.multinomial(q[first], 1, generator=generator).squeeze(1)
    odds = torch.stack((q[NUM_TOKENS].expand(NUM_DRAWS, -1), q[first]), dim=1)
    return torch.stack((first, second), dim=1).tolist(), list(odds)


@pytest.mark.parametrize("temperature", [0.5, pytest.param(1.0, marks=pytest.mark.promise), 1.6])
def test_the_ratio_test_keeps_the_targets_odds(temperature: float) -> None:
    """Chains drawn from q: first tokens follow p, and second ones p given the first."""
    target, draft = logits_and_draft_logits()
    chains, odds = drawn_chains(target_odds(draft, temperature))
    found = outputs(chains, odds, temperature, seed=5)
    p = target_odds(target, temperature).double()
    assert chi_square(counted(found[:, 0]), p[NUM_TOKENS]) < BOUND_11
    # The draft alone is far off, so the test has something to correct.
    first = torch.tensor([chain[0] for chain in chains])
    assert chi_square(counted(first), p[NUM_TOKENS]) > 2 * BOUND_11
    likely = p[NUM_TOKENS].argsort(descending=True)[:9].tolist()
    pooled = sum(
        chi_square(counted(found[(found[:, 0] == one) & (found[:, 1] >= 0), 1]), p[one])
        for one in likely
    )
    assert pooled < BOUND_99


@pytest.mark.promise
def test_a_residual_that_is_not_resampled_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check fails when a rejected draft is replaced by a draw from p itself."""
    monkeypatch.setattr(testing, "_without_draft", lambda odds, q: odds)
    target, draft = logits_and_draft_logits()
    chains, odds = drawn_chains(target_odds(draft, 1.0))
    found = outputs(chains, odds, 1.0, seed=5)
    p = target_odds(target, 1.0).double()
    assert chi_square(counted(found[:, 0]), p[NUM_TOKENS]) > BOUND_11


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_fixed_guesses_keep_the_targets_odds(temperature: float) -> None:
    """A tree of guesses that nobody drew: the same chain in every row, as memory drafts are."""
    target, _ = logits_and_draft_logits()
    found = outputs([[4, 7]] * NUM_DRAWS, None, temperature, seed=6)
    p = target_odds(target, temperature).double()
    assert chi_square(counted(found[:, 0]), p[NUM_TOKENS]) < BOUND_11
    behind = found[(found[:, 0] == 4) & (found[:, 1] >= 0), 1]
    assert len(behind) > 100
    assert chi_square(counted(behind), p[4]) < BOUND_11


@pytest.mark.promise
@pytest.mark.parametrize(
    "drafts",
    [
        (kinds.PREVIOUS,),
        (kinds.HEAD,),
        (kinds.EXTRAPOLATION, "ngram", kinds.RECYCLED, kinds.HEAD),
    ],
)
def test_drafted_sampling_draws_the_tokens_of_plain_sampling(drafts: tuple[str, ...]) -> None:
    """Noise belongs to the position, so drafts change how many passes it takes and nothing else."""
    decoder = tiny_decoder()
    target = fast_target(decoder)
    torch.manual_seed(0)
    head = EagleHead(head_sizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False)
    method = find_method("lossless").with_drafts(drafts).with_sampling(0.7, seed=9)
    drafted = Decoding(target, method, DraftModels(head=head))
    plain = Decoding(target, find_method("autoregressive").with_sampling(0.7, seed=9))
    session, alone = Session.of(3), Session.of(3)
    saved = 0
    for step in range(6):
        prompts = random_prompts(decoder, [2, 5, 3], seed=step // 3)
        expected = tokens_of(plain.decode(prompts, alone))
        traces = drafted.decode(prompts, session)
        assert tokens_of(traces) == expected
        saved += sum(LENGTH - trace.num_passes for trace in traces)
    assert saved > 0 or drafts == (kinds.HEAD,)


def test_drawn_chains_run_end_to_end_and_repeat_with_their_seed() -> None:
    decoder = tiny_decoder()
    target = fast_target(decoder)
    torch.manual_seed(0)
    head = EagleHead(head_sizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False)
    prompts = random_prompts(decoder, [2, 5])
    runs = []
    for seed in (1, 1, 2):
        method = find_method("ratio-test").with_sampling(3.0, seed)
        drawn = Decoding(target, method, DraftModels(head=head))
        session = Session.of(2)
        traces = [drawn.decode(prompts, session) for _ in range(4)]
        runs.append([tokens_of(one) for one in traces])
        assert any(trace.accepted_lengths != (0,) * 7 for one in traces for trace in one)
    assert runs[0] == runs[1] != runs[2]


SAMPLED = {
    "plain": find_method("autoregressive"),
    "memory": find_method("lossless").with_drafts((kinds.PREVIOUS,)),
    "head": find_method("lossless").with_drafts((kinds.HEAD,)),
    "ratio-test": find_method("ratio-test"),
}


def sampling(decoder: LlamaDecoder, method: Method) -> Decoding:
    """With a head of random weights."""
    torch.manual_seed(0)
    head = EagleHead(head_sizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False)
    return Decoding(fast_target(decoder), method, DraftModels(head=head))


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sampled_answer_tells_the_greedy_tokens_whatever_drafted(name: str) -> None:
    """Plans told different things of one answer, and sessions remembered them."""
    decoder, session = tiny_decoder(), Session.of(2)
    sampled = sampling(decoder, SAMPLED[name].with_sampling(3.0, seed=4))
    for step in range(3):
        prompts = random_prompts(decoder, [2, 5], seed=step // 2)
        for row, trace in enumerate(sampled.decode(prompts, session)):
            prompt = prompts[row].embeds
            before = [list(trace.tokens[:place]) for place in range(LENGTH)]
            greedy = tuple(next_token(decoder, prompt, tokens) for tokens in before)
            assert trace.predicted == session.memories[row].own[-1] == greedy
            assert trace.relaxed_share > 0.0


@pytest.mark.parametrize("name", ["plain", "memory", "head"])
def test_a_sampled_pass_tells_what_was_drawn_after_each_node(name: str) -> None:
    decoder, session = tiny_decoder(), Session.of(2)
    sampled = sampling(decoder, SAMPLED[name].with_sampling(0.7, seed=4))
    for _ in range(3):
        for trace in sampled.decode(random_prompts(decoder, [2, 5]), session):
            drawn = [one.predictions[node] for one in trace.passes for node in (0, *one.path)]
            assert tuple(drawn) == trace.tokens


def test_relaxed_methods_refuse_to_sample() -> None:
    with pytest.raises(RequestError, match="cannot sample"):
        find_method("deft").with_sampling(0.5)


def siblings(drafts: list[int], q: torch.Tensor) -> DraftTree:
    """Drafts of the same token below a root, each drawn from q."""
    guesses = Branches(drafts, [0] * len(drafts), odds=q.expand(len(drafts), -1))
    return merge([0], [("test", guesses)], 64)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_several_drafts_of_one_token_keep_the_targets_odds(temperature: float) -> None:
    """Three draws from q behind the root: the first that stands, or what is left of p."""
    target, draft = logits_and_draft_logits()
    q = target_odds(draft, temperature)[NUM_TOKENS]
    generator = torch.Generator().manual_seed(12)
    drafts = torch.multinomial(q.expand(NUM_DRAWS, -1), 3, replacement=True, generator=generator)
    found, places = [], []
    for answer, some in zip(answers_of(temperature, 7), drafts.tolist(), strict=True):
        tree = siblings(some, q)
        path, bonus = judged(answer, tree, target[[NUM_TOKENS, *some]])
        found.append(first_two(path, bonus, tree))
        places += path[1:]
    tokens = torch.tensor(found)
    p = target_odds(target, temperature).double()
    assert chi_square(counted(tokens[:, 0]), p[NUM_TOKENS]) < BOUND_11
    assert len(places) / NUM_DRAWS > 0.5
    # Behind a draft that stood comes the target's own token, by its odds after that draft.
    likely = p[NUM_TOKENS].argsort(descending=True)[:9].tolist()
    kept = tokens[:, 1] >= 0
    behind = [tokens[kept & (tokens[:, 0] == one), 1] for one in likely]
    pooled = [chi_square(counted(one), p[token]) for one, token in zip(behind, likely, strict=True)]
    assert sum(pooled) < BOUND_99
    # Which of the siblings stood says that each was tried: later ones stand less often.
    shares = [places.count(one) / len(places) for one in (1, 2, 3)]
    assert shares[0] > shares[1] > shares[2] > 0


def test_every_draft_of_one_token_has_a_coin_of_its_own() -> None:
    """One token is far likelier than drafted, some a little, the others less: 16,000 draws.

    Only what is a little likelier is left to chance when a first draft has fallen.
    """
    num_draws, p = 4 * NUM_DRAWS, torch.tensor([0.4, *[0.1] * 5, *[0.1 / 6] * 6])
    q = torch.full((NUM_TOKENS,), 1 / NUM_TOKENS)
    generator = torch.Generator().manual_seed(13)
    drafts = torch.randint(0, NUM_TOKENS, (num_draws, 3), generator=generator).tolist()
    first = []
    for answer, some in zip(answers_of(1.0, 8, num_draws), drafts, strict=True):
        tree = siblings(some, q)
        first.append(first_two(*judged(answer, tree, p.log().expand(4, -1)), tree)[0])
    found = counted(torch.tensor(first))
    groups = [slice(0, 1), slice(1, 6), slice(6, 12)]
    counts, wanted = (torch.stack([x[one].sum() for one in groups]) for x in (found, p.double()))
    assert chi_square(counts, wanted) < 13.82  # the 99.9% quantile for 2 degrees of freedom


def test_the_bonus_token_is_drawn_with_its_positions_noise() -> None:
    """Drafts drawn by the target's odds all stand, so only the token behind them is drawn."""
    target, _ = logits_and_draft_logits()
    p = target_odds(target, 1.0)
    generator = torch.Generator().manual_seed(17)
    drafts = torch.randint(0, NUM_TOKENS, (100, 2), generator=generator).tolist()
    num_other = 0
    for answer, chain in zip(answers_of(1.0, 6, 100), drafts, strict=True):
        tree = chain_of(chain, torch.stack((p[NUM_TOKENS], p[chain[0]])))
        path, bonus = judged(answer, tree, logits_along(chain))
        assert len(path) == 3
        keys, places = torch.tensor([answer.noise_key]), torch.arange(3)[None]
        noise = exponential(keys, ANSWER, places, NUM_TOKENS)[0]
        assert bonus == int((p[chain[1]] / noise[2]).argmax())
        num_other += bonus != int((p[chain[1]] / noise[0]).argmax())
    assert num_other > 20


NUM_ROWS = 500
SHORT = 4  # tokens of an action whose odds can be summed over all that comes before


def exact_odds(
    decoder: LlamaDecoder, prompt: torch.Tensor, temperature: float
) -> list[torch.Tensor]:
    """The odds of tokens 1, 2 and 3 by adding up over every way to get there."""
    words = decoder.embedding.weight

    def after(tokens: torch.Tensor) -> torch.Tensor:
        embeds = torch.cat((prompt.expand(len(tokens), -1, -1), words[tokens]), dim=1)
        return (decoder.head(decoder(embeds)[:, -1]).double() / temperature).softmax(dim=1)

    first = after(torch.zeros(1, 0, dtype=torch.int64))[0]
    every = torch.arange(len(words))
    second = after(every[:, None])
    pairs = torch.cartesian_prod(every, every)
    third = torch.cat([after(part) for part in pairs.split(1024)])
    joint = (first[:, None] * second).flatten()
    return [first, first @ second, joint @ third]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(kinds.HEAD, TREE), (kinds.SMALL_MODEL, TreeShape.chain(3))],
    ids=["head, trees", "small model, chains"],
)
def test_drawn_drafts_keep_the_odds_of_whole_actions(kind: str, shape: TreeShape) -> None:
    """Actions with drafts that are drawn, over several passes, bonus tokens included."""
    num_actions = min(draws(1_000), NUM_DRAWS)
    decoder, temperature = tiny_decoder(), 3.0
    target = fast_target(decoder)
    torch.manual_seed(0)
    head = EagleHead(head_sizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False)
    method = find_method("ratio-test").with_sampling(temperature, seed=4)
    models = DraftModels(head=head, small_model=fast_target(first_layers(decoder, 1)))
    drawn = Decoding(target, method.with_drafts((kind,)).with_shape(shape), models)
    (one,) = random_prompts(decoder, [3])
    prompts = [one] * NUM_ROWS
    spec, found, kept = AnswerSpec.action(ActionSpace.in_bins(SHORT)), [], 0
    for batch in range(num_actions // NUM_ROWS):
        numbers = range(batch * NUM_ROWS, (batch + 1) * NUM_ROWS)
        memories = [SessionMemory(num_draws=number) for number in numbers]
        traces = drawn.decode(prompts, Session(memories, spec))
        found += tokens_of(traces)
        kept += sum(sum(trace.accepted_lengths) for trace in traces)
    assert 0.1 < kept / num_actions < 1.9  # some stand and some fall
    counts = torch.tensor(found)
    for place, odds in enumerate(exact_odds(decoder, one.embeds, temperature)):
        tokens = torch.bincount(counts[:, place], minlength=len(odds)).double()
        rare = odds * num_actions < 8
        folded = [torch.cat((x[~rare], x[rare].sum()[None])) for x in (tokens, odds)]
        # The 99.9% quantile of chi-square lies below this for 10 to 80 degrees of freedom.
        degrees = len(folded[1]) - 1
        bound = degrees + 3.1 * (2 * degrees) ** 0.5 + 7
        assert chi_square(folded[0][folded[1] > 0], folded[1][folded[1] > 0]) < bound, place


def keys_of(seed: int, draws: list[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor([noise_key(seed, one) for one in draws])


def test_the_noise_of_drafts_and_of_answers_never_meets() -> None:
    """Seen for real: one seed for both, and the target drew the draft's token a position later."""
    draws = [(session, number) for session in (0, 1, 2**62) for number in (0, 1, 1_000_003)]
    found = [
        uniform(
            torch.tensor([noise_key(seed, one) for one in draws]),
            stream,
            torch.arange(4).expand(9, -1),
            3,
        )
        for seed in range(3)
        for stream in (ANSWER, COIN, DRAFT)
    ]
    assert len(set(torch.stack(found).flatten().tolist())) == 9 * 9 * 4 * 3


@pytest.mark.parametrize("kind", [kinds.HEAD, kinds.SMALL_MODEL])
def test_a_frame_is_answered_alike_in_any_company(
    kind: str,
) -> None:
    """Same seed, memory and frame: in a fresh process, an old one and a batch, drafts included."""
    decoder = tiny_decoder()
    target = fast_target(decoder)
    torch.manual_seed(0)
    head = EagleHead(head_sizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False)
    models = DraftModels(head=head, small_model=fast_target(first_layers(decoder, 1)))
    method = find_method("ratio-test").with_drafts((kind,)).with_sampling(3.0, 1)

    def answer(before: int, beside: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        drawn = Decoding(target, method, models)
        for _ in range(before):
            drawn.decode(random_prompts(decoder, [5, 3], seed=9), Session.of(2))
        lengths = [4, 2, 7][: 1 + beside]
        session = Session.of(1 + beside)
        session.memories[0] = SessionMemory(noise=77)
        others = random_prompts(decoder, lengths, seed=4)
        prompts = [*random_prompts(decoder, [4], seed=4), *others[1:]]
        trace = drawn.decode(prompts, session)[0]
        return trace.tokens, trace.accepted_lengths

    first = answer(before=0, beside=0)
    assert answer(before=3, beside=0) == first
    assert answer(before=1, beside=2)[0] == first[0]


def test_fresh_sessions_draw_different_noise() -> None:
    decoder = tiny_decoder()
    method = find_method("lossless").with_sampling(3.0, 1)
    drawn = Decoding(fast_target(decoder), method)
    prompts = random_prompts(decoder, [4], seed=4)
    spec = AnswerSpec.action(ActionSpace.in_bins(LENGTH))
    answers = {
        tokens_of(drawn.decode(prompts, Session([SessionMemory(noise=one)], spec)))[0]
        for one in range(8)
    }
    assert len(answers) > 4
