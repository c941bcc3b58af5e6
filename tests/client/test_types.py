"""What robots send and get back, as values."""

from dataclasses import replace

from deft_client.types import ActOptions, StageTimings, altered


def test_an_altered_record_is_what_replace_makes_of_it():
    asked, spent = ActOptions("arm", radius=3), StageTimings(wire_ms=1.0)

    assert altered(asked, {"session_id": "b"}) == replace(asked, session_id="b")
    assert altered(spent, {"queue_ms": 2.0, "wire_ms": 0.5}) == StageTimings(0.5, 2.0)
    assert (asked.session_id, spent.queue_ms) == ("arm", 0.0)
