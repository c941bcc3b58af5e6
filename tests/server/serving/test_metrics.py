"""What is counted, without a server around it."""

import numpy as np
import pytest

from deft_core.types import ActionChunk, DecodeTrace, PassTrace, StageTimings
from deft_server.errors import DeadlineError
from deft_server.serving.metrics import MAX_KEYS, OTHER_KEYS, Metrics
from tests.server.serving.queued import queued


@pytest.mark.parametrize(("num_frames", "size", "busy_s"), [(1, 4, 0.5), (4, 4, 2.0), (1, 1, 2.0)])
def test_frames_that_a_replica_answers_at_the_same_time_share_its_time(num_frames, size, busy_s):
    metrics = Metrics()
    for number in range(num_frames):
        metrics.count_frame(queued(number, "a", 0.0, service_s=2.0, batch_size=size))
    assert f'deft_replica_seconds_total{{replica="0"}} {busy_s}\n' in metrics.page().decode()


def test_answers_are_counted_with_waiting_stages_and_drafts():
    one = PassTrace(True, (5, 6), (-1, 0), ("", "previous"), (6, 7), (1,), 7)
    trace = DecodeTrace("deft", (5, 6, 7, 8), (5, 6, 7, 9), (1.0,) * 4, (one, one))
    timings = StageTimings(vision_ms=500.0, total_ms=900.0, round_trip_ms=950.0)
    metrics = Metrics()
    metrics.observe_answer(ActionChunk(np.zeros((1, 7)), timings, trace), 0.25, 1.5)
    page = metrics.page().decode().splitlines()
    assert {
        "deft_act_seconds_sum 1.5",
        "deft_queue_seconds_sum 0.25",
        'deft_stage_seconds_total{stage="vision"} 0.5',
        "deft_passes_sum 2.0",
        "deft_accepted_tokens_total 2.0",
        "deft_relaxed_tokens_total 1.0",
    } <= {*page}
    assert sum(line.startswith("deft_stage_seconds_total{") for line in page) == 1


def test_frames_are_counted_by_key_and_no_more_keys_than_a_page_can_bear():
    metrics = Metrics()
    for number in range(MAX_KEYS + 50):
        metrics.count_outcome(f"arm-{number}", DeadlineError("late"))
        metrics.count_outcome(f"arm-{number}")
    page = metrics.page().decode()
    assert 'deft_key_frames_total{key="arm-1",outcome="late"} 1.0' in page
    assert f'deft_key_frames_total{{key="{OTHER_KEYS}",outcome="answered"}} 50.0' in page
    assert page.count("deft_key_frames_total{") <= 2 * (MAX_KEYS + 1)
    assert f'deft_unanswered_frames_total{{reason="DeadlineError"}} {MAX_KEYS + 50}.0' in page
