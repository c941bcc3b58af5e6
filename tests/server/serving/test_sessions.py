"""Sessions: made, kept, forgotten, never shared."""

import pytest

from deft_server.serving.sessions import SessionStore, flow_of

pytestmark = pytest.mark.promise


def test_a_session_keeps_its_memory_until_it_is_reset():
    store = SessionStore(ttl_s=60, max_sessions=10)
    first = store.open("arm", "a", 0.0)
    assert store.open("arm", "a", 1.0) is first
    assert store.reset("arm", "a")
    assert store.open("arm", "a", 2.0) is not first
    assert not store.reset("arm", "b")


def test_two_callers_never_share_a_session():
    store = SessionStore(ttl_s=60, max_sessions=10)
    ours = store.open("arm-1", "a", 0.0)
    theirs = store.open("arm-2", "a", 0.0)
    assert ours is not theirs
    assert ours.flow != theirs.flow
    store.reset("arm-2", "a")
    assert store.open("arm-1", "a", 1.0) is ours


def test_no_choice_of_names_makes_two_callers_flows_equal():
    pairs = [("a", "b:c"), ("a:b", "c"), ("a:b:c", None), ("a", None), ("1:a", "b"), ("1", "a:b")]
    assert len({flow_of(*pair) for pair in pairs}) == len(pairs)


def test_a_frame_that_names_no_session_leaves_nothing_behind():
    store = SessionStore(ttl_s=60, max_sessions=10)
    first = store.open("arm", None, 0.0)
    assert store.open("arm", None, 0.0) is not first
    assert len(store) == 0


def test_a_session_without_frames_ends():
    store = SessionStore(ttl_s=60, max_sessions=10)
    idle = store.open("arm", "idle", 0.0)
    busy = store.open("arm", "busy", 0.0)
    assert store.open("arm", "busy", 50.0) is busy
    assert store.open("arm", "idle", 61.0) is not idle
    assert len(store) == 2


def test_sessions_end_by_the_clock_without_anybody_elses_frame():
    store = SessionStore(ttl_s=60, max_sessions=10)
    store.open("arm", "idle", 0.0)
    store.open("lab", "idle", 0.0)
    busy = store.open("arm", "busy", 50.0)
    store.expire(61.0)
    assert store.names() == [("arm", "busy")]
    assert store.open("arm", "busy", 62.0) is busy


def test_the_least_recently_used_session_makes_room():
    store = SessionStore(ttl_s=60, max_sessions=2)
    kept = store.open("arm", "a", 0.0)
    store.open("arm", "b", 1.0)
    store.open("arm", "a", 2.0)
    store.open("arm", "c", 3.0)
    assert len(store) == 2
    assert store.open("arm", "a", 4.0) is kept
    assert [session_id for _, session_id in store.names()] == ["c", "a"]


def test_a_caller_with_many_sessions_pushes_out_its_own_and_nobody_elses():
    """Once another key could open 1,100 sessions and have a robot's limits forgotten."""
    store = SessionStore(ttl_s=60, max_sessions=10)
    ours = store.open("robot", "a", 0.0)
    for number in range(50):
        store.open("other", str(number), 1.0)
    assert store.open("robot", "a", 2.0) is ours
    assert len(store) == 10
    assert ("other", "49") in store.names()
    store.expire(62.5)
    assert len(store) == 0


def test_whoever_asked_is_told_of_every_session_that_ends():
    ended: list[tuple[str, str]] = []
    store = SessionStore(ttl_s=60, max_sessions=2, on_end=lambda *one: ended.append(one))
    store.open("arm", "reset", 0.0)
    store.reset("arm", "reset")
    store.open("arm", "pushed out", 1.0)
    store.open("arm", "a", 2.0)
    store.open("arm", "b", 3.0)
    store.expire(70.0)
    assert ended == [("arm", one) for one in ("reset", "pushed out", "a", "b")]
