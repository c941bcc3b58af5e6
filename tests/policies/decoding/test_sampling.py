import pytest
import torch

from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.read import draw_tokens
from deft_policies.decoding.sampling import ANSWER, COIN, DRAFT, first_maximum, noise_key, uniform
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.memory import SessionMemory
from tests.policies.decoding.scripts import Decoding, Session, tokens_of
from tests.tiny_openvla import random_prompts, tiny_model

KNOWN = [
    0.208747078,
    0.09070418,
    0.018722225,
    0.34438292,
    0.527490788,
    0.726332757,
    0.395836134,
    0.12407812,
]
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])


def test_the_first_of_equal_maxima_is_taken() -> None:
    assert first_maximum(torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 0.0]])).tolist() == [1, 0]


def drawn(temperature: float, draws: list[tuple[int, int]], places: torch.Tensor) -> torch.Tensor:
    """Tokens [row, place] by the odds of LOGITS."""
    method, rows = find_method("autoregressive").with_sampling(temperature), []
    for draw, row in zip(draws, places.tolist(), strict=True):
        answer = Answer(method, AnswerSpec.action(ActionSpace.in_bins(7)))
        answer.noise_key = noise_key(3, draw)
        tokens = []
        for place in row:
            answer.tokens = [0] * place
            root = DraftTree.of_committed([0])
            tokens.append(int(draw_tokens(answer, root, LOGITS[None])[0]))
        rows.append(tokens)
    return torch.tensor(rows)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_of_logits_over_temperature(temperature: float) -> None:
    """Chi-square over 4,000 draws: 18.5 is the 99.9th percentile at four degrees of freedom."""
    num_draws = 4_000
    draws = drawn(temperature, [(0, 0)], torch.arange(num_draws)[None])
    expected = torch.softmax(LOGITS / temperature, dim=0) * num_draws
    observed = torch.bincount(draws.flatten(), minlength=5)
    assert float(((observed - expected) ** 2 / expected).sum()) < 18.5


def test_a_row_draws_the_same_whatever_shares_its_batch() -> None:
    model = tiny_model()
    prompts = random_prompts(model, [4, 6, 2])
    target = Target(model.decoder, model.config.action_tokens)
    sampled = find_method("autoregressive").with_sampling(1.5, seed=11)
    spec = AnswerSpec.action(ActionSpace.in_bins(7))

    def decode(rows: list[int]) -> list[tuple[int, ...]]:
        batch = [prompts[row] for row in rows]
        memories = [SessionMemory(num_draws=row) for row in rows]
        return tokens_of(Decoding(target, sampled).decode(batch, Session(memories, spec)))

    together = decode([0, 1, 2])
    assert [decode([row])[0] for row in range(3)] == together
    assert decode([0, 1, 2]) == together
    greedy = Decoding(target, find_method("autoregressive")).decode(prompts, Session.of(3))
    assert tokens_of(greedy) != together


def test_a_negative_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be 0 or more"):
        find_method("lossless").with_sampling(-0.1)


def test_sessions_draw_independently_under_one_seed() -> None:
    """A first action, drawn by a thousand sessions: as many draws as by one session's thousand."""
    rows = [(session, 0) for session in range(1000)]
    draws = drawn(1.0, rows, torch.zeros(1000, 1, dtype=torch.int64))
    expected = torch.softmax(LOGITS, dim=0) * 1000
    observed = torch.bincount(draws.flatten(), minlength=5)
    assert float(((observed - expected) ** 2 / expected).sum()) < 18.5


def test_noise_is_what_it_was_in_any_process() -> None:
    """Known numbers: a replica or a later version must draw them, too."""
    keys = torch.tensor([noise_key(7, draw) for draw in [(0, 0), (2**63 - 1, 5)]])
    places = torch.tensor([[0, 9], [0, 9]])
    found = uniform(keys, ANSWER, places, 2)
    assert found.flatten().tolist() == pytest.approx(KNOWN, abs=1e-8)


@pytest.mark.parametrize("stream", [ANSWER, COIN, DRAFT])
def test_noise_is_uniform_and_no_two_numbers_have_to_do_with_each_other(stream: int) -> None:
    keys = torch.tensor([noise_key(1, draw) for draw in [(0, number) for number in range(40)]])
    numbers = uniform(keys, stream, torch.arange(20).expand(40, -1), 500)
    flat = numbers.flatten()
    shares = torch.histc(flat, 10, 0.0, 1.0) / len(flat)
    assert float((shares - 0.1).abs().max()) < 0.002
    for dim in range(3):
        moved = numbers.roll(1, dims=dim).flatten()
        assert abs(float(torch.corrcoef(torch.stack((flat, moved)))[0, 1])) < 0.008
