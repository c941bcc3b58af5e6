"""What the dashboard remembers, and what it concludes from decode traces."""

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from deft_core.types import (
    ActionChunk,
    ActOptions,
    DecodeTrace,
    FastAnswer,
    Observation,
    PassTrace,
    StageTimings,
)
from deft_policies.errors import NoActionError
from deft_server.dashboard import history as history_module
from deft_server.dashboard.history import (
    KEPT_S,
    MAX_CAMERAS,
    MAX_POINTS,
    MAX_SESSIONS,
    PICTURE_SIDE,
    TICK_S,
    UNNAMED,
    UNWATCHED_SIDE,
    WINDOW_S,
    History,
    PassCounts,
    Thought,
    counts_of,
)
from deft_server.dashboard.pages import thought_fields
from deft_server.errors import DeadlineError
from deft_server.serving.events import FinishedAction, SessionEnded
from tests.server.dashboard.talkative import TalkativePolicy

FRAME = Observation(np.zeros((4, 4, 3), np.uint8), "lift")


def finished(
    session_id: str | None = "arm",
    total_ms: float = 10.0,
    trace: DecodeTrace | None = None,
    error: Exception | None = None,
    observation: Observation = FRAME,
) -> FinishedAction:
    timings = StageTimings(prepare_ms=1.0, total_ms=total_ms)
    return FinishedAction(
        caller="lab",
        session_id=session_id,
        step=0,
        observation=observation,
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
    counts = counts_of(trace_of(chain(0, 0, is_prefill=True), chain(2, 4), chain(4, 4)))
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
    assert counts_of(trace_of(tree)).draft_length == 3


def test_without_drafts_nothing_is_claimed_about_them() -> None:
    counts = counts_of(trace_of(chain(0, 0)))
    assert math.isnan(counts.acceptance)
    assert math.isnan(counts.draft_length)
    assert math.isnan(counts.draft_cost)


def test_counts_agree_with_an_independent_walk_over_random_traces() -> None:
    policy = TalkativePolicy(seed=3)
    for _ in range(50):
        trace = policy._decode("relaxed")
        counts = counts_of(trace)
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


def test_pictures_are_reduced_and_bounded_and_outlive_their_session() -> None:
    def frame() -> Observation:
        image = np.zeros((2000, 1500, 3), np.uint8)
        return Observation(image, "lift", {f"camera-{number}": image for number in range(8)})

    history = History()
    tracemalloc.start()
    for number in range(MAX_SESSIONS + 26):
        history.note(finished(f"arm-{number}", observation=frame()), now_s=float(number))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < MAX_SESSIONS * MAX_CAMERAS * PICTURE_SIDE**2 * 3 + 2**20
    last = history.sessions[f"lab/arm-{MAX_SESSIONS + 25}"]
    assert list(last.pictures) == ["", "camera-0", "camera-1"]
    assert all(max(one.shape) <= PICTURE_SIDE for one in last.pictures.values())
    history.note(SessionEnded("lab", last.session_id), now_s=100.0)
    assert list(last.pictures) == ["", "camera-0", "camera-1"]
    assert (last.num_answers, last.ended_s) == (1, 100.0)
    history.note(finished(last.session_id), now_s=101.0)
    assert last.ended_s is None


def test_what_nobody_looks_at_is_kept_without_traces_and_in_small_pictures() -> None:
    image = np.zeros((2000, 1500, 3), np.uint8)
    trace = TalkativePolicy()._decode("relaxed")
    history = History()
    event = finished("arm", trace=trace, observation=Observation(image, "lift"))
    history.note(event, now_s=1.0, is_watched=False)
    (session,) = history.sessions.values()
    assert session.trace is None
    assert max(session.pictures[""].shape) <= UNWATCHED_SIDE
    assert (session.points[0].total_ms, session.points[0].passes) == (10.0, 0)
    history.note(event, now_s=2.0)
    assert session.trace is trace
    assert session.points[1].passes == trace.num_passes


def test_what_nobody_looks_at_has_a_new_picture_once_a_second() -> None:
    def see(brightness: int, now_s: float, is_watched: bool = False) -> int:
        frame = Observation(np.full((4, 4, 3), brightness, np.uint8), "lift")
        history.note(finished(observation=frame), now_s, is_watched)
        return int(history.sessions["lab/arm"].pictures[""][0, 0, 0])

    history = History()
    assert [see(1, 1.0), see(2, 1.5), see(3, 1.9), see(4, 2.0)] == [1, 1, 1, 4]
    assert [see(5, 2.1, is_watched=True), see(6, 2.2, is_watched=True)] == [5, 6]
    assert len(history.sessions["lab/arm"].points) == 6  # every answer is remembered


def test_late_frames_are_told_from_other_errors() -> None:
    history = History()
    for error in (DeadlineError("late"), DeadlineError("late"), ValueError("bad")):
        history.note(finished("arm", error=error), now_s=1.0)
    (session,) = history.sessions.values()
    assert (session.num_late, session.num_errors) == (2, 3)


def test_the_last_quarter_of_an_hour_is_remembered_and_no_more() -> None:
    history = History()
    for second in range(2000):
        history.note(finished("steady", total_ms=float(second)), now_s=float(second))
        if second == 1500:
            history.note(finished("incident", error=DeadlineError("late")), now_s=float(second))
        if second == 100:
            history.note(finished("long ago"), now_s=float(second))
    history.forget_old(now_s=2000.0)
    assert set(history.sessions) == {"lab/steady", "lab/incident"}
    assert len(history.timeline) == KEPT_S / TICK_S
    assert history.timeline[0].start_s == 2000 - KEPT_S
    assert [one.start_s for one in history.timeline if one.errors] == [1500.0]
    assert {one.answers for one in history.timeline} == {5}
    assert history.timeline[-1].slowest_ms == 1999.0


def test_running_sums_agree_with_sums_over_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "_MAX_WINDOW", 40)
    policy, history = TalkativePolicy(seed=5), History()
    notes: list[tuple[float, DecodeTrace]] = []
    now_s = 0.0
    for number in range(120):
        now_s += 4.0 if number % 50 == 49 else 0.3
        trace = policy._decode("relaxed")
        notes = [*notes, (now_s, trace)][-40:]
        history.note(finished(trace=trace), now_s)
        inside = [counts_of(one) for at_s, one in notes if now_s - at_s <= WINDOW_S]
        counts = sum(inside, PassCounts())
        figures = history.overview(now_s)
        assert figures["actions"] == len(inside)
        assert figures["acceptance"] == counts.acceptance
        assert figures["draft_cost"] == pytest.approx(counts.draft_cost)
        assert figures["tokens_per_pass"] == counts.tokens / counts.passes


def test_looking_adds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    for number in range(50):
        history.note(finished(trace=trace_of(chain(2, 4))), now_s=number / 10)

    def refuse(*_: PassCounts) -> PassCounts:
        raise AssertionError("summed again")

    monkeypatch.setattr(PassCounts, "__add__", refuse)
    assert history.overview(now_s=6.0)["actions"] == 50


def thought(text: str, error: Exception | None = None) -> FinishedAction:
    done = finished(error=error)
    return done if done.chunk is None else replace(done, chunk=replace(done.chunk, reasoning=text))


def test_texts_are_kept_even_where_they_hold_no_action() -> None:
    history = History()
    history.note(thought("go ACTION: x"), 0.0)
    error = NoActionError("it did not end")
    error.reasoning = "go PLAN: go"
    history.note(thought("", error), 1.0)
    session = history.sessions["lab/arm"]
    assert session.thought is not None
    assert (session.thought.text, session.thought.before) == ("go PLAN: go", "go ACTION: x")
    assert session.thought.error == "it did not end"
    told = thought_fields(session.thought)
    assert [(one["tag"], one["before"]) for one in told["parts"]] == [("TASK", "go"), ("PLAN", "")]
    history.note(finished(), 2.0)
    assert session.thought is None


def test_an_answer_of_numbers_is_rows_of_what_was_drafted_and_what_was_not() -> None:
    passes = [
        PassTrace(True, (0, 1, 2), (-1, 0, 1), ("", "a", "a"), (1, 2, 10), (1, 2), 10),
        PassTrace(False, (10,), (-1,), ("",), (3,), (), 3),
    ]
    trace = DecodeTrace("lossless", (1, 2, 10, 3, 11), (1, 2, 10, 3, 11), (), passes)
    told = thought_fields(Thought("12 3 4 5", None, trace, actions=np.zeros((2, 2))))
    assert told["rows"] == [
        [{"drafted": True, "text": "12"}, {"drafted": False, "text": " 3"}],
        [{"drafted": False, "text": "4 5"}],
    ]
    untold = thought_fields(Thought("12 3", None, None, "it did not end"))
    assert untold["rows"] == [[{"drafted": False, "text": "12 3"}]]
    assert thought_fields(Thought("go PLAN: 1", None, trace))["rows"] is None


def test_an_answer_in_fast_codes_is_shown_as_coefficients_and_actions() -> None:
    fast = FastAnswer((5, -1, 0, 2), (True, False, False, True))
    trace = DecodeTrace("lossless", (1, 2), (1, 2), (), (), fast=fast)
    actions = np.array([[0.5, -0.25], [1.0, 0.0]])
    told = thought_fields(Thought("<a><b>", None, trace, actions=actions))
    assert told["fast"] == {**vars(fast), "actions": actions.tolist()}
    others = [
        Thought("<a><b>", None, replace(trace, fast=None), actions=actions),
        Thought("<a><b>", None, None, actions=actions),  # nobody looked, so there is no trace
        Thought("<a><b>", None, trace, "it did not end"),
    ]
    assert [thought_fields(one)["fast"] for one in others] == [None] * 3


def test_a_session_has_a_name_that_people_can_read_and_tell_apart():
    history = History()
    for number, session_id in enumerate(("arm", f"{7:032x}", None)):
        history.note(replace(finished(session_id), caller=("lab", "anonymous")[number % 2]), 0.0)
    names = [one.name for one in history.sessions.values()]
    assert names == ["lab · arm", "session 0000", f"lab · {UNNAMED}"]
