"""Numbers that are not finite end one answer, and leave nothing behind for those that come later.

One token's embedding is broken: every pass that reads the token computes NaN.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from deft_client.types import ActOptions, Observation
from deft_policies.base import ActRequest, Running
from deft_policies.errors import NotFiniteError
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.formats import Precision
from tests import golden_ecot

METHODS = ("autoregressive", "lossless:guard=off")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden_ecot.write(tmp_path_factory.mktemp("broken") / "thinker")


def thinker(folder: Path) -> VlaPolicy:
    """A policy that writes text before it acts."""
    return load_policy(
        ModelOptions(
            checkpoint=str(folder),
            family="ecot",
            statistics_key="bridge_orig",
            device="cpu",
            precision=Precision.FLOAT32,
            num_threads=1,
        )
    )


def asked(number: int, method: str, num_words: int, max_tokens: int) -> ActRequest:
    """A frame of its own; more words make a longer prompt."""
    image = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    options = ActOptions(decoding=method, max_tokens=max_tokens, want_reasoning=True)
    return ActRequest(Observation(image, "lift it " * num_words), options=options)


@contextmanager
def broken_words(policy: VlaPolicy, tokens: Sequence[int]) -> Iterator[None]:
    """Meanwhile, whoever reads one of these tokens computes NaN."""
    words = policy.token_model.network.decoder.embedding.weight.data
    whole = words[list(tokens)].clone()
    words[list(tokens)] = float("nan")
    try:
        yield
    finally:
        words[list(tokens)] = whole


def rounds_of(policy: VlaPolicy, frames: Sequence[Running]) -> list[int]:
    """Play answers to their end; after how many rounds each of them ended."""
    ended, rounds = [0] * len(frames), 0
    while not all(ended):
        policy.step()
        rounds += 1
        ended = [one or rounds * frame.has_ended for one, frame in zip(ended, frames, strict=True)]
    return ended


def tokens_of(frame: Running) -> tuple[int, ...]:
    assert frame.error is None
    assert frame.answer is not None
    assert frame.answer.chunk.trace is not None
    return frame.answer.chunk.trace.tokens


def answers_of(policy: VlaPolicy, requests: Sequence[ActRequest]) -> list[tuple[int, ...]]:
    frames = policy.start(requests)
    rounds_of(policy, frames)
    return [tokens_of(frame) for frame in frames]


@pytest.mark.parametrize("method", METHODS)
def test_a_text_ends_in_the_round_whose_numbers_are_not_finite(folder: Path, method: str) -> None:
    policy = thinker(folder)
    requests = [asked(0, method, 1, 60), asked(1, method, 2, 60)]
    bad, fine = answers_of(policy, requests)
    num_fine = next(n for n, token in enumerate(bad) if token not in bad[:n] and token not in fine)
    with broken_words(policy, [bad[num_fine]]):
        frames = policy.start(requests)
        rounds = rounds_of(policy, frames)
    assert isinstance(frames[0].error, NotFiniteError)
    assert (
        1 < rounds[0] <= num_fine + 2
    )  # one for each token, and the one that reads the broken word
    assert tokens_of(frames[1]) == fine
