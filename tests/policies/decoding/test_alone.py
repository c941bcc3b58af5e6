"""An answer depends on its own frame alone: not on who joins, hangs up or is cut beside it."""

import gc
from collections.abc import Sequence

import pytest
import torch

from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.planner import DraftModels
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import Target
from deft_policies.memory import SessionMemory
from deft_policies.model.kv_cache import KVCache
from tests.policies.decoding.scripts import clock
from tests.policies.decoding.test_any_length import decoder, prompt
from tests.tiny_target import ACTIONS

METHODS = (
    "autoregressive",
    "lossless:plan=memory",
    "lossless:plan=memory+recycled",
    "token-recycling",
)


def row_of(method: str, max_tokens: int, seed: int) -> Answer:
    """An answer of a session that has acted once."""
    own = tuple(ACTIONS.first + (7 * seed + place) % 48 for place in range(max_tokens))
    return Answer(
        find_method(method),
        AnswerSpec.action(ActionSpace.in_bins(max_tokens)),
        SessionMemory(own=(own,), noise=seed),
    )


def ends(engine: Engine, rows: Sequence[Answer]) -> None:
    with torch.inference_mode():
        while any(not row.is_done for row in rows):
            engine.step(clock())


def alone(method: str, max_tokens: int, seed: int) -> list[int]:
    row = row_of(method, max_tokens, seed)
    engine = Engine(Target(decoder(), ACTIONS))
    with torch.inference_mode():
        engine.start([prompt(3, seed)], [row])
    ends(engine, [row])
    return row.tokens


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lengths", [(7, 7), (5, 7), (7, 5)])
def test_a_row_that_joins_at_a_cancel_answers_as_alone(
    method: str, lengths: tuple[int, int]
) -> None:
    """Two rows join a running one that is cancelled before the next round: a robot hung up."""
    engine = Engine(Target(decoder(), ACTIONS))
    first = row_of(method, 7, 1)
    joined = [row_of(method, length, seed) for seed, length in enumerate(lengths, start=2)]
    with torch.inference_mode():
        engine.start([prompt(3, 1)], [first])
        engine.step(clock())
        engine.start([prompt(3, 2), prompt(3, 3)], joined)
        engine.cancel(first)
    ends(engine, joined)
    assert [row.tokens for row in joined] == [
        alone(method, length, seed) for seed, length in enumerate(lengths, start=2)
    ]


@pytest.mark.parametrize("method", METHODS)
def test_a_row_cancelled_before_its_first_pass_harms_no_neighbour(
    method: str,
) -> None:
    engine = Engine(Target(decoder(), ACTIONS))
    gone, kept = row_of(method, 7, 1), row_of(method, 7, 2)
    with torch.inference_mode():
        engine.start([prompt(3, 1), prompt(3, 2)], [gone, kept])
        engine.cancel(gone)
    ends(engine, [kept])
    assert kept.tokens == alone(method, 7, 2)


@pytest.mark.parametrize(
    "method", ["pld", "lossless:drafts=ngram", "lossless:drafts=ngram+previous"]
)
def test_a_session_that_has_acted_writes_a_text_drafted_from_n_grams(method: str) -> None:
    """Actions of the past say nothing of the places of a text beyond an action's length."""
    text = AnswerSpec(40, 5, ActionSpace.in_bins(7))
    engine = Engine(Target(decoder(), ACTIONS))
    memory = SessionMemory(own=((30, 31, 32, 33, 34, 35, 36),) * 3)
    row, plain = (
        Answer(find_method(method), text, memory),
        Answer(find_method("autoregressive"), text),
    )
    with torch.inference_mode():
        for one in (row, plain):
            engine.decode([prompt(3, 1)], [one], clock())
    assert len(plain.tokens) > 7
    assert row.tokens == plain.tokens


def test_memory_is_of_what_is_served_and_not_of_what_callers_name() -> None:
    """Every method that a caller makes up may get caches of its own; few of them are kept."""
    engine = Engine(Target(decoder(), ACTIONS), DraftModels(small_model=Target(decoder(), ACTIONS)))
    before = num_caches()
    for share in range(1, 60):
        rows = [row_of(f"small-model:patch_share={share / 1000 + i / 10}", 7, i) for i in range(3)]
        with torch.inference_mode():
            engine.start([prompt(3, 1)] * 3, rows)
        ends(engine, rows)
    assert num_caches() - before <= 20


def num_caches() -> int:
    gc.collect()
    return sum(type(one) is KVCache for one in gc.get_objects())


def most_bytes_beside(methods: Sequence[str]) -> int:
    """Of all tensors that texts need, of which eight are on their way at a time."""
    small = Target(decoder(), ACTIONS)
    engine = Engine(Target(decoder(), ACTIONS), DraftModels(small_model=small))
    before, most, running = num_bytes(), 0, list[Answer]()
    for seed, method in enumerate(methods):
        row = Answer(find_method(method), AnswerSpec(20, None, ActionSpace.in_bins(7)))
        with torch.inference_mode():
            engine.start([prompt(3, seed % 8)], [row])
            running.append(row)
            while len(running) >= 8:
                ended = engine.step(clock())
                running = [one for one in running if one not in ended]
        if seed % 8 == 7:
            most = max(most, num_bytes() - before)
    return most


def num_bytes() -> int:
    gc.collect()
    every = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    storages = [one.untyped_storage() for one in every if one.layout is torch.strided]
    return sum({one._cdata: one.nbytes() for one in storages}.values())


def test_texts_of_many_methods_need_little_more_memory_than_texts_of_one() -> None:
    many = [f"small-model:patch_share={share / 100}" for share in range(1, 41)]
    alike = most_bytes_beside(["small-model:patch_share=0.5"] * len(many))
    assert most_bytes_beside(many) <= 1.2 * alike
