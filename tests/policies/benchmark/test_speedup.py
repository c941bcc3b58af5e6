"""The formula for speculation beside a simulation of it, and what a benchmark makes of traces."""

import random

import pytest

from deft_core.measures.statistics import Percentiles
from deft_policies.benchmark.summary import Speed
from deft_policies.benchmark.tables import batch_table
from scripts.reproduce.measures import expected_speedup, expected_tokens


def simulated(acceptance: float, length: int, seed: int = 0) -> float:
    rng = random.Random(seed)
    total = 0
    for _ in range(20_000):
        kept = 0
        while kept < length and rng.random() < acceptance:
            kept += 1
        total += kept + 1
    return total / 20_000


@pytest.mark.parametrize(("acceptance", "length"), [(0.7, 5), (0.4, 3), (0.95, 6), (0.0, 4)])
def test_the_formula_is_what_a_simulation_counts(acceptance: float, length: int) -> None:
    assert expected_tokens(acceptance, length) == pytest.approx(
        simulated(acceptance, length), abs=0.05
    )


def test_the_usual_example_commits_less_than_three_tokens() -> None:
    """alpha = 0.7 and K = 5: 2.94 tokens, not 3.77; at a cost of 0.2 each 1.47 times as fast."""
    assert expected_tokens(0.7, 5) == pytest.approx(2.9412, abs=1e-4)
    assert expected_speedup(0.7, 5, 0.2) == pytest.approx(1.4706, abs=1e-4)
    assert expected_tokens(1.0, 5) == 6


def speed(name: str, size: int, ms: float) -> Speed:
    return Speed(name, size, 9, Percentiles(ms, ms, ms, ms, 9), {})


def test_batches_are_compared_with_plain_decoding_of_the_same_size() -> None:
    text = batch_table(
        [
            speed("autoregressive", 1, 10.0),
            speed("lossless", 1, 5.0),
            speed("autoregressive x4", 4, 20.0),
            speed("lossless x4", 4, 25.0),
        ],
        "autoregressive",
    )
    assert "100.0 (1.00)" in text
    assert "200.0 (2.00)" in text
    assert "160.0 (0.80)" in text
    assert batch_table([speed("autoregressive", 1, 10.0)], "autoregressive") == ""
