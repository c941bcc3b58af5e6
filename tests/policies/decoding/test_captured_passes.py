"""Passes that are captured once and replayed: nothing is captured later, and answers are the same.

A recorder stands for CUDA graphs: it repeats operations on the memory that they were recorded with,
so that what a pass read of the host is frozen, and what has moved since is an error.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from deft_policies.decoding.captured import NARROW, CapturedPasses, shapes_of
from deft_policies.decoding.drafts.captured_head import steps_of
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import PassRow
from deft_policies.errors import NotFiniteError
from deft_policies.memory import SessionMemory
from tests.policies.decoding.captures import (
    FORM,
    PROMPTS,
    TEXT,
    Captured,
    decoder,
    plain_engine,
    play,
    prompts_of,
    said,
)
from tests.policies.decoding.scripts import METHODS, clock
from tests.tiny_target import LENGTH, greedy

# What two robots at once had to run uncaptured before: other radii, traces, log-probabilities.
MIXED = (
    "autoregressive",
    "within-bins:radius=1",
    "within-bins:radius=3",
    "spec-vla-strict",
    "lossless:drafts=previous+head,guard=off",
    "lossless:drafts=medusa,guard=off",
    "fly",
    "autoregressive:temperature=1",
)


@pytest.fixture(scope="module")
def captured() -> Captured:
    return Captured()


@pytest.fixture(scope="module")
def plain() -> Engine:
    return plain_engine()


@pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])
def test_a_method_answers_as_where_nothing_is_captured(
    captured: Captured, plain: Engine, method: Method
) -> None:
    method = replace(method, is_guarded=False)
    assert play(captured.engine, [method]) == play(plain, [method])
    captured.check_nothing_was_captured_since()


def test_any_methods_share_the_captured_passes(captured: Captured, plain: Engine) -> None:
    methods = [find_method(name) for name in MIXED]
    assert play(captured.engine, methods) == play(plain, methods)
    captured.check_nothing_was_captured_since()


def test_a_round_has_at_most_two_passes(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A narrow one and a wide one, for seven methods and a text."""
    rounds: list[list[int]] = []
    run_passes, run_pass = CapturedPasses.run_passes, CapturedPasses._run_pass

    def noted_round(self: CapturedPasses, rows: Sequence[PassRow]) -> list[int]:
        rounds.append([])
        return run_passes(self, rows)

    def noted_pass(self: CapturedPasses, rows: Sequence[PassRow], width: int, at: int) -> None:
        rounds[-1].append(width)
        run_pass(self, rows, width, at)

    monkeypatch.setattr(CapturedPasses, "run_passes", noted_round)
    monkeypatch.setattr(CapturedPasses, "_run_pass", noted_pass)
    rows = [Answer(find_method(name), FORM) for name in MIXED[:7]]
    rows.append(Answer(find_method("lossless"), TEXT, SessionMemory(answer=(7,) * 10)))
    with torch.inference_mode():
        captured.engine.decode(prompts_of(PROMPTS, 0), rows, clock())
    assert max(map(len, rounds)) == 2
    assert all(width <= NARROW for widths in rounds for width in widths[:-1])
    assert len(rounds) == max(row.num_passes for row in rows) - 1  # one for all, behind prefills


def test_an_answer_among_others_is_the_answer_alone(captured: Captured) -> None:
    methods = [find_method(name) for name in MIXED]
    together = play(captured.engine, methods, num_frames=1)
    prompts = prompts_of(PROMPTS, 0)
    for method, prompt, among in zip(methods, prompts, together, strict=True):
        alone = Answer(method, FORM, SessionMemory(noise=methods.index(method)))
        with torch.inference_mode():
            captured.engine.decode([prompt], [alone], clock())
        assert said(alone) == among, method.name


def test_traces_and_log_probabilities_need_no_pass_of_their_own(
    captured: Captured, plain: Engine
) -> None:
    def found(engine: Engine) -> list[Answer]:
        rows = [
            Answer(find_method(name), FORM, wants_margins=True, wants_log_probs=True)
            for name in MIXED
        ]
        with torch.inference_mode():
            engine.decode(prompts_of(PROMPTS, 0), rows, clock())
        return rows

    for replayed, computed in zip(found(captured.engine), found(plain), strict=True):
        assert said(replayed) == said(computed)
        assert replayed.trace is not None
        assert replayed.margins == pytest.approx(computed.margins, abs=1e-4)
        assert replayed.log_probs == pytest.approx(computed.log_probs, abs=1e-4)
        assert len(replayed.margins) == len(replayed.log_probs) == LENGTH
        for one, other in zip(replayed.records, computed.records, strict=True):
            assert (one.tree.tokens, one.predictions) == (other.tree.tokens, other.predictions)
    captured.check_nothing_was_captured_since()


def test_texts_are_decoded_by_captured_passes(captured: Captured, plain: Engine) -> None:
    methods = [find_method(name) for name in ("autoregressive", "lossless:guard=off")]
    assert play(captured.engine, methods, TEXT) == play(plain, methods, TEXT)
    captured.check_nothing_was_captured_since()


def test_answers_that_join_and_leave_change_nothing(captured: Captured) -> None:
    """Also while passes of plain decoding run ahead of what the host has read."""
    engine, rng = captured.engine, random.Random(5)
    for seed in range(6):
        prompts = prompts_of(PROMPTS, seed)
        names = [rng.choice(("autoregressive", *MIXED[3:6])) for _ in prompts]
        rows = [Answer(find_method(name), FORM) for name in names]
        with torch.inference_mode():
            engine.start(prompts[:5], rows[:5])
            for _ in range(rng.randint(1, 4)):
                engine.step(clock())
            engine.cancel(rows[1])
            engine.start(prompts[5:], rows[5:])
            while engine.unfinished:
                engine.step(clock())
        del rows[1]
        wanted = [one for index, one in enumerate(greedy(decoder(), prompts)) if index != 1]
        assert [tuple(row.tokens) for row in rows] == wanted
    captured.check_nothing_was_captured_since()


def test_more_answers_than_slots_wait_for_one(captured: Captured) -> None:
    prompts = prompts_of([*PROMPTS, *PROMPTS], 7)
    rows = [Answer(find_method("autoregressive"), FORM) for _ in prompts]
    with torch.inference_mode():
        captured.engine.decode(prompts, rows, clock())
    assert [tuple(row.tokens) for row in rows] == greedy(decoder(), prompts)
    captured.check_nothing_was_captured_since()


def test_plain_decoding_runs_ahead_of_the_host(captured: Captured) -> None:
    """Two passes at most are unread, so that the device never waits for the host."""
    engine = captured.engine
    (prompt,), row = prompts_of([3], 1), Answer(find_method("autoregressive"), FORM)
    unread = []
    with torch.inference_mode():
        engine.start([prompt], [row])
        while engine.unfinished:
            engine.step(clock())
            unread.append(row.num_unread)
    assert max(unread) == 2
    assert tuple(row.tokens) == greedy(decoder(), [prompt])[0]


def test_what_is_captured_depends_on_the_reserve_alone(captured: Captured) -> None:
    reserve = captured.runner.reserve
    shapes = shapes_of(reserve, captured.engine.captured.widest, True)
    assert len(set(shapes)) == len(shapes)
    of_head = len(steps_of(reserve.batches)) + 1  # and that of prompts
    of_block = 2 * len(reserve.batches) + 1  # chains and trees, and prompts
    assert captured.num_captured == len(shapes) + of_head + of_block


@pytest.mark.parametrize("widest", [1, 8, 16])
def test_riders_fit_where_trees_are_small(plain: Engine, widest: int) -> None:
    """One slot and small trees: a prefill with its riders has no more room than a pass."""
    captured = Captured(rows=1, widest=widest)
    methods = [find_method("lossless:drafts=ngram+previous,guard=off")]
    for spec in (FORM, TEXT):
        tokens = [one[0] for one in play(captured.engine, methods, spec)]
        assert tokens == [one[0] for one in play(plain, methods, spec)]
    captured.check_nothing_was_captured_since()


@pytest.mark.parametrize("method", ["autoregressive", "lossless:plan=memory"])
def test_a_prompt_that_is_not_finite_spoils_no_later_answer(method: str) -> None:
    """A shorter prompt is padded to the same captured length, over what the longer one has left."""
    engine = Captured(rows=1).engine
    short, long = prompts_of((2, 8), 0)
    spoilt = replace(long, embeds=torch.full_like(long.embeds, float("nan")))
    with torch.inference_mode():
        wanted = Answer(find_method(method), FORM, SessionMemory(own=((1,) * LENGTH,) * 3))
        engine.decode([short], [wanted], clock())
        broken = Answer(find_method(method), FORM)
        with pytest.raises(NotFiniteError):
            engine.decode([spoilt], [broken], clock())
        found = Answer(find_method(method), FORM, SessionMemory(own=((1,) * LENGTH,) * 3))
        engine.decode([short], [found], clock())
    assert found.is_finite
    assert said(found) == said(wanted)
