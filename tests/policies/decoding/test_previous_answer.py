"""The last answer as a draft: the same tokens, in as many passes as there are changes.

The target here says a given text, whatever was said before, so that what changes between two
answers is known.
"""

import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from deft_policies.decoding.drafts.previous_answer import Alignment
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.guard import best_width
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import PassRow, Scores, Target
from deft_policies.fast.codec import to_coefficients
from deft_policies.fast.files import read_codec
from deft_policies.fast.grammar import strides_of
from deft_policies.memory import SessionMemory
from deft_policies.model.kv_cache import KVCache
from tests import golden_ecot
from tests.draws import draws
from tests.policies.decoding.scripts import clock
from tests.policies.decoding.test_any_length import STOP, decoder, prompt
from tests.policies.fast.test_codec import GOLDEN as GOLDEN_FAST
from tests.tiny_target import ACTIONS, VOCABULARY, scores_of

LENGTH = 257
METHOD = find_method("lossless:guard=off")


class WantedTarget(Target):
    """Wants one text per slot, and computes nothing: positions only say how far it has come."""

    texts: Sequence[Sequence[int]] = ()

    def forward(self, cache: KVCache, rows: Sequence[PassRow]) -> Scores:
        said = []
        for row in rows:
            if row.prompt is not None:
                self.lengths[row.slot] = row.prompt.length
            cache.reserve(row.slot + 1, row.start + row.tree.num_nodes)
            text = [*self.texts[row.slot], STOP]
            for depth in row.tree.depths():
                prompt = self.lengths.get(row.slot, row.start)  # while widths are timed
                place = row.start - prompt + 1 + depth
                said.append(text[min(place, len(text) - 1)])
        logits = one_hot(torch.tensor(said), VOCABULARY).float()
        return scores_of(rows, logits[:, :0], logits)

    @cached_property
    def lengths(self) -> dict[int, int]:
        return {}  # of prompts, by slot


def answer(texts: Sequence[Sequence[int]], memories: Sequence[SessionMemory]) -> list[Answer]:
    """Let the target say these texts, in one batch."""
    target = WantedTarget(decoder(), ACTIONS)
    target.texts = texts
    rows = [Answer(METHOD, AnswerSpec(400, STOP), memory) for memory in memories]
    with torch.inference_mode():
        prompts = [prompt(2 + index, 0) for index in range(len(rows))]
        Engine(target, widest=512).decode(prompts, rows, clock())
    assert [row.tokens for row in rows] == [list(text) for text in texts]
    return rows


def text_of(seed: int, length: int = LENGTH) -> list[int]:
    """Words that come back, as in what robots think: tokens are far from unique."""
    rng = random.Random(seed)
    words = [[rng.randrange(6, VOCABULARY) for _ in range(rng.randint(1, 4))] for _ in range(40)]
    text: list[int] = []
    while len(text) < length - 1:
        text += rng.choice(words)
    return [*text[: length - 1], STOP]


def passes(old: Sequence[int], new: Sequence[int]) -> int:
    (row,) = answer([new], [SessionMemory(answer=tuple(old))])
    return row.num_passes


def test_an_answer_that_has_not_changed_takes_one_pass() -> None:
    assert passes(text_of(0), text_of(0)) == 1


@pytest.mark.parametrize("seed", range(4))
def test_one_token_replaced_takes_two(seed: int) -> None:
    old = text_of(seed)
    new = list(old)
    new[100] = 6 + (new[100] - 6 + 1) % (VOCABULARY - 6)
    assert passes(old, new) == 2


@pytest.mark.parametrize("seed", range(4))
def test_edits_of_one_token_far_apart_take_about_a_pass_each(seed: int) -> None:
    rng = random.Random(seed)
    old = text_of(seed)
    places = [12 + 24 * index for index in range(10)]
    replaced, inserted, deleted = list(old), list(old), list(old)
    for place in reversed(places):
        other = 6 + (old[place] - 6 + rng.randint(1, 60)) % (VOCABULARY - 6)
        replaced[place] = other
        inserted.insert(place, other)
        del deleted[place]
    assert passes(old, replaced) <= 12
    assert passes(old, inserted) <= 16
    assert passes(old, deleted) <= 16


def test_what_the_target_says_behind_old_words_is_drafted_next() -> None:
    """Here it says the same whatever stands before, so the first pass tells of every edit.

    One more pass carries half of the text, and another one the rest.
    """
    old = text_of(0)
    new = [
        6 + (token - 5) % (VOCABULARY - 6) if n % 20 == 7 else token for n, token in enumerate(old)
    ]
    assert sum(a != b for a, b in zip(old, new, strict=True)) == 13
    assert passes(old, new) == 3


def test_nonsense_behind_old_words_costs_no_more_passes() -> None:
    alignment, new = Alignment([1, 2, 3, 4, 5, 6, 7, 8]), [1, 2, 9, 4, 5, 6]
    alignment.guess([], 8, 8)
    alignment.take(new[:3], [1, 2, 9, 0, 0, 0, 0, 0, 0])
    drafted, parents = alignment.guess(new[:3], 40, 8)
    pairs = list(zip(parents, drafted, strict=True))
    above = 0
    for token in (4, 5, 6, 7, 8):
        above = pairs.index((above, token)) + 1


def passes_of_ids(
    old: Sequence[int],
    new: Sequence[int],
    limit: int,
    strides: Mapping[int, int] | None = None,
    width: int = 512,
) -> int:
    """Passes until a target that wants `new` has said it, counted without a model."""
    alignment, said, num = Alignment(old, strides), list[int](), 0
    while len(said) < len(new):
        alignment.take(said)
        ahead = new[len(said) : -1]
        drafted, parents = alignment.guess(said, width - 1, limit - 1 - len(said))
        above, kept = 0, 0
        for token in ahead:
            found = [
                n
                for n, one in enumerate(zip(parents, drafted, strict=True))
                if one == (above, token)
            ]
            if not found:
                break
            above, kept = found[0] + 1, kept + 1
        said += new[len(said) : len(said) + kept + 1]
        num += 1
    return num


def test_codes_line_up_by_what_they_stand_for() -> None:
    """One code in place of two, behind which the same numbers go on but no code is the same place.

    Codes 10 to 19 stand for one number each, 20 to 29 for two.
    """
    strides = {token: token // 10 for token in range(10, 30)}
    old = [10, 11, 12, 13, 14, 15, 16, 17, 18]
    alignment = Alignment(old, strides)
    alignment.guess([], 64, 64)
    alignment.take([10, 23])  # three numbers; the old answer goes on with 13
    drafted, parents = alignment.guess([10, 23], 64, 64)
    assert drafted[-6:] == [13, 14, 15, 16, 17, 18]
    assert parents[-6:] == [0, *range(len(drafted) - 5, len(drafted))]
    narrow, _ = alignment.guess([10, 23], 6, 64)
    assert 13 in narrow


@pytest.mark.parametrize(("num_steps", "folder"), [(1, "characters"), (8, "bytes")])
def test_codes_of_wobbling_numbers_take_fewer_passes_by_coefficients(
    num_steps: int, folder: str
) -> None:
    codec, random = read_codec(GOLDEN_FAST / folder), np.random.default_rng(0)
    strides = dict(enumerate(strides_of(codec.pieces)))
    counts = []
    for _ in range(100):
        actions = random.uniform(-0.9, 0.9, (1, 7)) + 0.2 * random.normal(size=(num_steps, 7))
        numbers = np.array(to_coefficients(actions, codec.scale))
        moved = numbers + (random.random(len(numbers)) < 0.1) * random.choice([-1, 1], len(numbers))
        old, new = (codec.encode_coefficients(one.tolist()) for one in (numbers, moved))
        ways = (passes_of_ids(old, new, 128, one, 32) for one in (None, strides))
        counts.append([len(new), *ways])
    plain, by_index, by_coefficient = np.mean(counts, axis=0)
    assert by_coefficient < by_index < plain / 2


def test_later_golden_frames_take_an_eighth_of_their_tokens() -> None:
    counts = [
        passes_of_ids(old["generated_ids"], new["generated_ids"], one["max_new_tokens"])
        for one in golden_ecot.expected()["sessions"]
        for old, new in pairwise(one["frames"])
    ]
    assert len(counts) == 21
    assert sum(counts) / 21 <= 30


edits = st.lists(
    st.tuples(st.sampled_from("rid m"), st.integers(0, 10**6), st.integers(6, VOCABULARY - 1)),
    max_size=12,
)


def edited(text: Sequence[int], some: Sequence[tuple[str, int, int]]) -> list[int]:
    """Replacements, insertions, deletions and moves."""
    new = list(text[:-1])
    for kind, number, token in some:
        place = number % max(len(new), 1)
        if kind == "r" and new:
            new[place] = token
        elif kind == "i":
            new.insert(place, token)
        elif kind == "d":
            del new[place : place + 1 + number % 3]
        elif kind == "m":
            part = new[place : place + 5]
            del new[place : place + 5]
            new[number % max(len(new), 1) : 0] = part
    return [*new[:398], STOP]


Sessions = list[tuple[int, int, list[tuple[str, int, int]]]]
SESSIONS = st.lists(
    st.tuples(st.integers(0, 99), st.integers(1, 120), edits), min_size=2, max_size=2
)


WHAT_IS_DRAWN: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],
}


@settings(max_examples=draws(25), **WHAT_IS_DRAWN)
@given(SESSIONS)
def test_whatever_the_last_answer_was_the_tokens_are_the_targets(cases: Sessions) -> None:
    """`answer` asserts it; a session's next frame starts from what the last one left."""
    memories = [SessionMemory() for _ in cases]
    texts = [text_of(seed, length) for seed, length, _ in cases]
    for turn in range(3):
        rows = answer(texts, memories)
        memories = [row.memory for row in rows]
        assert [one.answer for one in memories] == [tuple(text) for text in texts]
        texts = [edited(text, some[turn:]) for text, (_, _, some) in zip(texts, cases, strict=True)]


def test_a_longer_answer_than_is_remembered_is_refused() -> None:
    with pytest.raises(ValueError, match="answer of at most 4096 tokens"):
        SessionMemory(answer=(1,) * 4097)


@pytest.mark.parametrize(
    ("pass_ms", "width"),
    [
        ({1: 1.0, 8: 1.05, 16: 1.1, 32: 1.15, 64: 1.2}, 32),  # wide passes cost little
        ({1: 1.0, 8: 3.0, 16: 5.0, 32: 9.0, 64: 17.0}, 8),
        ({1: 1.0, 8: 30.0, 16: 50.0, 32: 90.0, 64: 170.0}, 1),  # then it is decoded plainly
    ],
)
def test_a_pass_carries_as_much_of_the_last_text_as_pays_on_the_machine(
    pass_ms: dict[int, float], width: int
) -> None:
    assert best_width(pass_ms, edits_apart=7) == width


def test_the_first_text_of_a_session_is_decoded_plainly() -> None:
    (row,) = answer([text_of(0, 20)], [SessionMemory()])
    assert row.num_passes == 20
