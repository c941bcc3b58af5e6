import pytest
import torch

from deft_policies.decoding.autoregressive import AutoregressiveDecoder
from deft_policies.decoding.llama_target import LlamaTarget
from deft_policies.decoding.records import StageClock
from deft_policies.decoding.sampling import Sampling
from tests.tiny_openvla import CPU, one_row, random_prompts, tiny_model

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])


def test_temperature_zero_takes_the_first_of_equal_maxima() -> None:
    chooser = Sampling(0.0).chooser([0, 1], CPU)
    assert chooser.choose(torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 0.0]])).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_of_logits_over_temperature(temperature: float) -> None:
    """Chi-square over 4,000 draws: 18.5 is the 99.9th percentile at four degrees of freedom."""
    num_draws = 4_000
    generator_rows = Sampling(temperature, seed=3).chooser([0], CPU)
    draws = [int(generator_rows.choose(LOGITS[None])) for _ in range(num_draws)]
    expected = torch.softmax(LOGITS / temperature, dim=0) * num_draws
    observed = torch.bincount(torch.tensor(draws), minlength=5)
    assert float(((observed - expected) ** 2 / expected).sum()) < 18.5


def test_a_row_draws_the_same_whatever_shares_its_batch() -> None:
    model = tiny_model()
    prompts = random_prompts(model, [4, 6, 2])
    target = LlamaTarget(model.decoder, model.config.vocabulary.tokens)
    sampling = Sampling(1.5, seed=11)

    def decode(rows: list[int]) -> list[tuple[int, ...]]:
        batch = prompts if len(rows) == 3 else one_row(prompts, rows[0])
        decoder = AutoregressiveDecoder(target, sampling.chooser(rows, CPU))
        return [trace.tokens for trace in decoder.decode(batch, 7, StageClock(CPU))]

    together = decode([0, 1, 2])
    assert [decode([row])[0] for row in range(3)] == together
    assert decode([0, 1, 2]) == together
    greedy = AutoregressiveDecoder(target).decode(prompts, 7, StageClock(CPU))
    assert [trace.tokens for trace in greedy] != together


def test_a_negative_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be 0 or more"):
        Sampling(-0.1)
