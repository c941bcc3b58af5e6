"""The queue: each rule alone; `test_random_traffic` has all of them at once."""

import itertools
import math
from collections import Counter

import pytest

from deft_server.errors import DeadlineError, OverloadedError
from deft_server.serving.admission import ConcurrencyLimit
from deft_server.serving.frame import QueuedFrame
from deft_server.serving.queue import FrameQueue
from tests.server.serving.queued import numbers, queued

pytestmark = pytest.mark.promise

RULES = {"max_batch": 2, "max_waiting": 6, "patience_s": 0.2}


def queue_with(*frames: QueuedFrame) -> FrameQueue:
    queue = FrameQueue(**RULES)
    for frame in frames:
        queue.enqueue(frame, frame.arrived_s)
    return queue


def start(queue: FrameQueue, now_s: float) -> list[QueuedFrame]:
    chosen, _ = queue.next_batch(now_s)
    assert chosen
    return chosen


def finish(
    queue: FrameQueue, batch: list[QueuedFrame], now_s: float, service_s: float | None = None
) -> None:
    for frame in batch:
        queue.admission.finish(frame, now_s, service_s)


def busy_queue(service_s: float = 0.02, at_s: float = 0.0) -> tuple[FrameQueue, list[QueuedFrame]]:
    """Return a queue with one frame in flight, whose policy is known to take `service_s`."""
    queue = queue_with(queued(1000, "first", at_s))
    finish(queue, start(queue, at_s), at_s, service_s)
    queue.enqueue(queued(1001, "busy", at_s), at_s)
    return queue, start(queue, at_s)


def test_frames_are_answered_in_the_order_they_came():
    queue = queue_with(*(queued(n, f"s{n}", n / 1000) for n in range(4)))
    first = start(queue, 0.1)
    assert numbers(first) == [0, 1]
    finish(queue, first, 0.1)
    assert numbers(start(queue, 0.1)) == [2, 3]


def test_the_earliest_due_frame_goes_first():
    queue = queue_with(
        queued(1, "a", 0.0, deadline_s=0.9),
        queued(2, "b", 0.0, deadline_s=0.1),
        queued(3, "c", 0.0),
    )
    first = start(queue, 0.05)
    assert numbers(first) == [2, 3]
    finish(queue, first, 0.05)
    assert numbers(start(queue, 0.05)) == [1]


def test_deadlines_without_end_do_not_starve_a_frame_without():
    queue = queue_with(queued(0, "patient", 0.0))
    for turn in range(1, 20):
        at_s = turn * 0.05
        for one in (2 * turn, 2 * turn + 1):
            queue.enqueue(queued(one, f"s{one}", at_s, deadline_s=at_s + 0.1), at_s)
        batch = start(queue, at_s)
        finish(queue, batch, at_s + 0.05, 0.05)
        if 0 in numbers(batch):
            break
    assert at_s <= RULES["patience_s"]


def test_deadlines_are_met_beside_a_hundred_busy_sessions():
    """Once 118 of 192 such frames were refused or late: a frame without a deadline that was due
    went before them, and there were always enough of those."""
    queue, fates = FrameQueue(max_batch=8), Counter[str]()
    number = itertools.count()
    for turn in range(200):
        at_s = turn * 0.05  # a batch takes 50 ms
        crowd = [queued(next(number), f"s{n}", at_s) for n in range(100)]
        if turn % 4 == 0:
            crowd += [queued(next(number), f"robot{n}", at_s, at_s + 0.3) for n in range(4)]
        for frame in crowd:
            try:
                queue.enqueue(frame, at_s)
            except OverloadedError:
                assert not frame.has_deadline
            else:
                fates["joined"] += frame.has_deadline
        batch, expired = queue.next_batch(at_s)
        assert batch
        fates["expired"] += len(expired)
        fates["answered"] += sum(one.has_deadline for one in batch)
        fates["others"] += sum(not one.has_deadline for one in batch)
        finish(queue, batch, at_s + 0.05, 0.05)
    assert fates == {"joined": 200, "answered": 200, "expired": 0, "others": 1400}


def test_an_owner_beyond_its_share_pushes_nobody_out():
    queue, answered = FrameQueue(max_batch=2), Counter[str]()
    number = itertools.count()
    for turn in range(200):
        at_s = turn * 0.02
        for n in range(10):  # with deadlines, which do not help it to the share of others
            frame = queued(next(number), f"g{n}", at_s, at_s + 0.2, owner="greedy")
            try:
                queue.enqueue(frame, at_s)
            except DeadlineError:
                continue
        queue.enqueue(queued(next(number), "one", at_s, owner="modest"), at_s)
        batch = start(queue, at_s)
        answered.update(one.owner for one in batch)
        finish(queue, batch, at_s + 0.02, 0.02)
    assert answered["modest"] >= 180
    assert answered["greedy"] >= 180


def test_idle_time_earns_no_credit_and_time_alone_no_debt():
    queue = FrameQueue(max_batch=1)
    number = itertools.count()
    for turn in range(100):
        queue.enqueue(queued(next(number), "a", turn, owner="alone"), turn)
        finish(queue, start(queue, turn), turn)
    for n in range(6):
        for owner in ("alone", "comes"):
            queue.enqueue(queued(next(number), f"{owner}{n}", 100, owner=owner), 100)
    order = []
    for _ in range(12):
        batch = start(queue, 100)
        order.append(batch[0].owner)
        finish(queue, batch, 100)
    assert all({order[place], order[place + 1]} == {"alone", "comes"} for place in range(0, 12, 2))


def test_the_last_eighth_is_for_deadlines_and_new_owners():
    queue = FrameQueue(max_waiting=16)
    for n in range(14):
        queue.enqueue(queued(n, f"s{n}", 0.0, owner="greedy"), 0.0)
    with pytest.raises(OverloadedError):
        queue.enqueue(queued(14, "s14", 0.0, owner="greedy"), 0.0)
    queue.enqueue(queued(15, "one", 0.0, owner="modest"), 0.0)
    queue.enqueue(queued(16, "s16", 0.0, deadline_s=9.0, owner="greedy"), 0.0)
    with pytest.raises(OverloadedError) as refusal:
        queue.enqueue(queued(17, "other", 0.0, owner="other"), 0.0)
    assert refusal.value.retry_after_s >= 0


def test_a_newer_frame_of_a_session_takes_the_turn_of_the_one_that_waits():
    first = queued(1, "a", 0.0)
    queue = queue_with(first, queued(2, "b", 0.01), queued(3, "c", 0.02))
    assert queue.enqueue(queued(4, "a", 0.05), 0.05) is first
    assert numbers(start(queue, 0.1)) == [4, 2]


def test_frames_that_name_no_session_do_not_supersede_each_other():
    queue = queue_with(*(queued(n, "caller", 0.0, is_session=False) for n in range(2)))
    assert len(queue) == 2


def test_nothing_starts_while_a_batch_is_with_the_policy():
    queue, batch = busy_queue()
    queue.enqueue(queued(1, "a", 0.0), 0.0)
    assert queue.next_batch(0.0) == ([], [])
    finish(queue, batch, 0.02, 0.02)
    assert numbers(start(queue, 0.02)) == [1]


def test_a_lone_session_never_waits_for_company():
    queue = FrameQueue(**RULES)
    for turn in range(5):
        at_s = turn * 0.06
        queue.enqueue(queued(turn, "only", at_s), at_s)
        batch = start(queue, at_s)
        assert numbers(batch) == [turn]
        finish(queue, batch, at_s + 0.01, 0.01)


def test_a_staying_frame_takes_no_place_from_other_owners():
    queue = queue_with(*(queued(n, f"s{n}", 0.0, owner="new") for n in range(6)))
    for number in (10, 11):
        stays = queued(
            number, "old", 0.0, is_session=False, overfills_until_s=9.0, owner="old client"
        )
        queue.enqueue(stays, 0.0)
    with pytest.raises(OverloadedError):
        queue.enqueue(queued(12, "s12", 0.0, owner="new"), 0.0)
    assert numbers(start(queue, 0.0)) == [0, 10]
    queue.enqueue(queued(20, "s20", 0.0, owner="new"), 0.0)
    with pytest.raises(OverloadedError):
        queue.enqueue(queued(21, "s21", 0.0, owner="new"), 0.0)


def test_an_owner_whose_frames_stay_has_no_room_for_one_that_does_not():
    queue = queue_with(
        *(queued(n, "one", 0.0, is_session=False, overfills_until_s=9.0) for n in range(6))
    )
    with pytest.raises(OverloadedError):
        queue.enqueue(queued(10, "one", 0.0, is_session=False), 0.0)


def test_a_flow_with_many_frames_does_not_delay_one_with_one():
    queue, batch = busy_queue(service_s=0.02)
    for number in range(3):
        queue.enqueue(queued(number, "greedy", 0.0, is_session=False), 0.0)
    queue.enqueue(queued(10, "modest", 0.001), 0.001)
    finish(queue, batch, 0.02)
    assert numbers(start(queue, 0.02)) == [0, 10]


def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    queue, _ = busy_queue(service_s=0.02)
    with pytest.raises(DeadlineError):
        queue.enqueue(queued(1, "first", 0.0, deadline_s=0.03), 0.0)
    queue.enqueue(queued(2, "first", 0.0, deadline_s=0.05), 0.0)
    with pytest.raises(DeadlineError):  # even the batch that is under way takes longer
        queue.enqueue(queued(3, "never seen", 0.0, deadline_s=0.01), 0.0)


def test_a_passed_deadline_is_refused_without_measurements():
    with pytest.raises(DeadlineError):
        FrameQueue(**RULES).enqueue(queued(1, "a", 0.0, deadline_s=0.01), 0.02)


def test_a_frame_that_waited_too_long_is_dropped_before_its_batch_starts():
    queue, batch = busy_queue(service_s=0.02)
    late = queued(1, "first", 0.0, deadline_s=0.05)
    queue.enqueue(late, 0.0)
    finish(queue, batch, 0.04, 0.02)
    assert queue.next_batch(0.04) == ([], [late])


def test_one_slow_batch_does_not_lock_everybody_out():
    """A first batch of 5 s (a compilation, say) must not make the server refuse all deadlines of
    200 ms for ever: with nothing measured lately, the next frame is tried."""
    queue = queue_with(queued(1, "a", 0.0))
    finish(queue, start(queue, 0.0), 5.0, 5.0)
    with pytest.raises(DeadlineError):
        queue.enqueue(queued(2, "a", 5.5, deadline_s=5.7), 5.5)
    queue.enqueue(queued(3, "a", 6.5, deadline_s=6.7), 6.5)
    assert numbers(start(queue, 6.5)) == [3]


def test_a_reset_takes_the_waiting_frame_out():
    frame = queued(1, "a", 0.0)
    queue = queue_with(frame, queued(2, "b", 0.0))
    assert queue.remove_session("a") is frame
    assert numbers(start(queue, 0.0)) == [2]
    assert queue.remove_session("a") is None


def test_the_time_until_there_is_room_follows_the_measured_service_time():
    queue, _ = busy_queue(service_s=0.02)
    for number in range(3):
        queue.enqueue(queued(number, f"s{number}", 0.0), 0.0)
    assert math.isclose(queue.clears_in_s(0.005), 0.015 + 2 * 0.02)


def answered(queue: FrameQueue, frame: QueuedFrame, service_s: float) -> float:
    """Have one frame answered alone; return when that was."""
    queue.enqueue(frame, frame.arrived_s)
    batch = start(queue, frame.arrived_s)
    assert batch == [frame]
    finish(queue, batch, frame.arrived_s + service_s, service_s)
    return frame.arrived_s + service_s


def test_a_strangers_long_prompts_cost_nobody_a_deadline():
    """A frame's time is what its own flow has cost: 2,000 tokens of somebody else's are not its."""
    queue, now_s = FrameQueue(), 0.0
    for n in range(20):
        now_s = answered(queue, queued(2 * n, "stranger", now_s), 1.0)
        now_s = answered(queue, queued(2 * n + 1, "robot", now_s, now_s + 0.1), 0.05)
    now_s = answered(queue, queued(90, "stranger", now_s), 1.0)
    queue.enqueue(queued(98, "stranger", now_s), now_s)
    queue.enqueue(queued(99, "robot", now_s, now_s + 0.1), now_s)
    assert numbers(start(queue, now_s)) == [99, 98]
    with pytest.raises(DeadlineError):
        queue.enqueue(queued(100, "stranger", now_s, now_s + 0.1), now_s)


def test_a_flow_that_was_slow_once_is_tried_again_though_others_go_on():
    queue = FrameQueue()
    now_s = answered(queue, queued(0, "robot", 0.0), 5.0)  # a compilation, say
    for number in range(1, 30):
        now_s = answered(queue, queued(number, "other", now_s), 0.05)
    answered(queue, queued(30, "robot", now_s, now_s + 0.2), 0.05)


def test_joining_frames_leave_no_place_empty():
    queue = queue_with(queued(1, "a", 0.0))
    queue.admission.joins_midway = True
    first = start(queue, 0.0)
    for number in (2, 3):
        queue.enqueue(queued(number, f"s{number}", 0.0), 0.0)
    assert numbers(start(queue, 0.0)) == [2]
    finish(queue, first, 0.01, 0.01)
    assert numbers(start(queue, 0.01)) == [3]


def test_fewer_go_together_after_one_missed_its_deadline_in_company() -> None:
    limit = ConcurrencyLimit(8)
    limit.note(1.0, is_late=True)
    assert limit.value == 8  # alone it would have been late, too
    limit.note(4.0, is_late=True)
    assert 2 < limit.value < 3
    for _ in range(20):
        limit.note(4.0, is_late=True)
    assert limit.value == 1
    for _ in range(500):
        limit.note(1.0, is_late=False)
    assert limit.value == 8
