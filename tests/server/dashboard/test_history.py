"""What the dashboard remembers, and what it concludes from decode traces."""

import math

import numpy as np
import pytest

from deft_client.types import (
    ActionChunk,
    ActOptions,
    DecodeTrace,
    Observation,
    PassTrace,
    StageTimings,
)
from deft_server.dashboard.history import (
    MAX_POINTS,
    MAX_SESSIONS,
    UNNAMED,
    WINDOW_S,
    History,
    speculation_of,
)
from deft_server.serving.events import FinishedAction, SessionEnded
from tests.server.dashboard.talkative import TalkativePolicy

FRAME = Observation(np.zeros((4, 4, 3), np.uint8), "lift")


def finished(
    session_id: str | None = "arm",
    total_ms: float = 10.0,
    trace: DecodeTrace | None = None,
    error: Exception | None = None,
) -> FinishedAction:
    timings = StageTimings(prepare_ms=1.0, total_ms=total_ms)
    return FinishedAction(
        caller="lab",
        session_id=session_id,
        step=0,
        request_id="",
        observation=FRAME,
        options=ActOptions(),
        chunk=None if error else ActionChunk(np.ones((1, 7)), timings, trace),
        error=error,
    )


def chain(kept: int, drafted: int, is_prefill: bool = False) -> PassTrace:
    nodes = range(drafted + 1)
    return PassTrace(
        is_prefill=is_prefill,
        tokens=tuple(nodes),
        parents=tuple(node - 1 for node in nodes),
        sources=("",) + ("head",) * drafted,
        predictions=tuple(nodes),
        path=tuple(range(1, kept + 1)),
        bonus=0,
        draft_ms=0.5 * drafted,
        pass_ms=5.0,
    )


def trace_of(*passes: PassTrace) -> DecodeTrace:
    return DecodeTrace("m", (1, 2, 3), (1, 2, 4), (0.0, 0.0, 0.0), passes)


def test_acceptance_counts_only_drafts_that_were_judged() -> None:
    # Kept 2 of 4: the third was judged and refused, the fourth never was. Kept 4 of 4: four judged.
    counts = speculation_of(trace_of(chain(0, 0, is_prefill=True), chain(2, 4), chain(4, 4)))
    assert counts.tries == 3 + 4
    assert counts.acceptance == pytest.approx(6 / 7)
    assert counts.draft_length == 4
    assert counts.draft_cost == pytest.approx(0.5 / 5.0)
    assert counts.passes == 3
    assert counts.relaxed == 1


def test_the_depth_of_a_tree_is_its_longest_branch() -> None:
    tree = PassTrace(
        False, (0, 1, 2, 3, 4), (-1, 0, 0, 2, 3), ("", "a", "a", "a", "a"), (0,) * 5, (1,), 0
    )
    assert speculation_of(trace_of(tree)).draft_length == 3


def test_without_drafts_nothing_is_claimed_about_them() -> None:
    counts = speculation_of(trace_of(chain(0, 0)))
    assert math.isnan(counts.acceptance)
    assert math.isnan(counts.draft_length)
    assert math.isnan(counts.draft_cost)


def test_counts_agree_with_an_independent_walk_over_random_traces() -> None:
    policy = TalkativePolicy(seed=3)
    for _ in range(50):
        trace = policy._decode("relaxed")
        counts = speculation_of(trace)
        kept = tries = 0
        for one in trace.passes:
            longest = max(_ancestors(one, node) for node in range(len(one.tokens)))
            kept += len(one.path)
            tries += len(one.path) + (len(one.path) < longest)
        assert (counts.kept, counts.tries) == (kept, tries)


def _ancestors(one: PassTrace, node: int) -> int:
    return 0 if one.parents[node] < 0 else 1 + _ancestors(one, one.parents[node])


def test_percentiles_are_of_the_window_only() -> None:
    history = History()
    history.note(finished(total_ms=9000.0), now_s=0.0)
    for number in range(1, 101):
        history.note(finished(total_ms=float(number)), now_s=100.0 + number / 100)
    figures = history.overview(now_s=101.0)
    assert (figures["p50_ms"], figures["p95_ms"], figures["p99_ms"]) == (50.0, 95.0, 99.0)
    assert figures["rate_hz"] == pytest.approx(100, rel=0.02)
    empty = history.overview(now_s=101.0 + WINDOW_S + 1)
    assert math.isnan(empty["p50_ms"])
    assert math.isnan(empty["rate_hz"])


def test_errors_are_counted_apart_from_latency() -> None:
    history = History()
    history.note(finished(total_ms=5.0), now_s=0.0)
    history.note(finished(error=ValueError("x")), now_s=0.1)
    figures = history.overview(now_s=1.0)
    assert figures["errors"] == 1
    assert figures["p99_ms"] == 5.0
    session = history.sessions["lab/arm"]
    assert (session.num_answers, session.num_errors) == (1, 1)


def test_memory_is_bounded_in_points_and_sessions() -> None:
    history = History()
    for number in range(MAX_POINTS + 50):
        history.note(finished(), now_s=float(number))
    assert len(history.sessions["lab/arm"].points) == MAX_POINTS
    assert history.sessions["lab/arm"].points[-1].number == MAX_POINTS + 50
    for number in range(MAX_SESSIONS):
        history.note(finished(f"arm-{number}"), now_s=1000.0 + number)
    assert len(history.sessions) == MAX_SESSIONS
    assert "lab/arm" not in history.sessions


def test_frames_without_a_session_have_a_place_too() -> None:
    history = History()
    history.note(finished(None), now_s=0.0)
    history.note(SessionEnded("lab", "arm"), now_s=0.1)
    assert list(history.sessions) == [f"lab/{UNNAMED}"]
    assert history.version == 2


def test_a_session_knows_its_pace() -> None:
    history = History()
    for number in range(20):
        history.note(finished(), now_s=number / 10)
    session = history.sessions["lab/arm"]
    assert session.rate_hz(now_s=2.0) == pytest.approx(10)
    assert session.rate_hz(now_s=60.0) == 0
