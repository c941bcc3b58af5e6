"""Numbers that are not finite end one answer, and leave nothing behind for those that come later.

One token's embedding is broken: every pass that reads the token computes NaN.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from deft_core.types import ActOptions, DecodeTrace, Observation
from deft_policies.base import PolicyRequest, Running
from deft_policies.decoding.planner import DraftModels
from deft_policies.errors import NotFiniteError
from deft_policies.families.loading import load_policy
from deft_policies.families.openvla import OpenVLA
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.draft_heads import EagleHead, head_sizes
from deft_policies.model.formats import Precision
from tests import golden_ecot
from tests.policies.families.test_policy import request_for, tiny_policy

LATE = 16  # tokens that are fine before the first broken one
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


def asked(number: int, method: str, num_words: int, max_tokens: int) -> PolicyRequest:
    """A frame of its own; more words make a longer prompt."""
    image = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    options = ActOptions(decoding=method, max_tokens=max_tokens, want_reasoning=True)
    return PolicyRequest(Observation(image, "lift it " * num_words), options=options)


@contextmanager
def broken_words(policy: VlaPolicy, tokens: Collection[int]) -> Iterator[None]:
    """Meanwhile, whoever reads one of these tokens computes NaN."""
    words = policy.model.network.decoder.embedding.weight.data
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


def trace_of(frame: Running) -> DecodeTrace:
    assert frame.error is None
    assert frame.answer is not None
    assert frame.answer.chunk.trace is not None
    return frame.answer.chunk.trace


def traces_of(policy: VlaPolicy, requests: Sequence[PolicyRequest]) -> list[DecodeTrace]:
    frames = policy.start(requests)
    rounds_of(policy, frames)
    return [trace_of(frame) for frame in frames]


def answers_of(policy: VlaPolicy, requests: Sequence[PolicyRequest]) -> list[tuple[int, ...]]:
    return [one.tokens for one in traces_of(policy, requests)]


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
    assert trace_of(frames[1]).tokens == fine


def of_many_lengths(method: str) -> list[PolicyRequest]:
    """As many as a batch has room for: what one leaves behind lies within another's reach."""
    return [asked(number, method, 1 + number, 40) for number in range(8)]


def late_words(answers: Sequence[tuple[int, ...]]) -> set[int]:
    """Tokens that no answer has among its first ones."""
    early = {token for one in answers for token in one[:LATE]}
    return {token for one in answers for token in one[LATE:]} - early


@pytest.mark.parametrize("method", METHODS)
def test_answers_after_broken_ones_are_as_good_as_the_first(folder: Path, method: str) -> None:
    policy = thinker(folder)
    requests = of_many_lengths(method)
    good = answers_of(policy, requests)
    with broken_words(policy, late_words(good)):
        frames = policy.start(requests)
        rounds = rounds_of(policy, frames)
    broken = [isinstance(one.error, NotFiniteError) for one in frames]
    assert broken.count(True) >= 6
    assert min(rounds) > LATE
    for _ in range(2):
        assert answers_of(policy, requests[::-1]) == good[::-1]


@pytest.mark.promise
@pytest.mark.parametrize("method", METHODS)
def test_actions_after_broken_ones_that_were_given_up_are_as_good_as_the_first(method: str) -> None:
    """The host reads an action's passes when it ends: whoever leaves earlier leaves unread NaN."""
    policy = tiny_policy(ModelOptions(decoding=method))
    requests = [request_for(number, text="lift it " * (1 + number)) for number in range(8)]
    good = answers_of(policy, requests)
    with broken_words(policy, {one[-3] for one in good}):
        frames = policy.start(requests)
        for _ in range(6):
            policy.step()
        for frame in frames:
            policy.cancel(frame)
    assert answers_of(policy, requests[::-1]) == good[::-1]


def test_a_head_drafts_after_broken_answers_as_it_did_before() -> None:
    """A head keeps keys of its own, made of hidden states: here of a prompt that is broken."""
    torch.manual_seed(0)
    head = EagleHead(head_sizes(32, 48, 4, 4, max_positions=256)).requires_grad_(False)
    model = tiny_policy().model
    assert isinstance(model, OpenVLA)
    policy = VlaPolicy(model, ModelOptions(decoding="lossless:drafts=head"), DraftModels(head))
    requests = [request_for(number, text="lift it " * (1 + number)) for number in range(8)]
    before = traces_of(policy, requests)
    long, word = "lift it " * 15 + "over", sum(b"over") % 300  # as `word_ids` has it
    assert word in model.encode(long)
    with broken_words(policy, [word]):
        frames = policy.start([request_for(7, text=long), *requests[1:]])
        rounds_of(policy, frames)
    assert isinstance(frames[0].error, NotFiniteError)
    assert any(frame.error is None for frame in frames)
    assert list(map(drafted, traces_of(policy, requests))) == list(map(drafted, before))


def drafted(trace: DecodeTrace) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(one.tokens, one.parents) for one in trace.passes]
