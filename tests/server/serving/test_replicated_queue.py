"""The queue where the policy is there several times."""

import math

import pytest

from deft_server.errors import DeadlineError
from deft_server.serving.frame import QueuedFrame
from deft_server.serving.queue import FrameQueue
from tests.server.serving.queued import numbers, queued
from tests.server.serving.test_queue import finish, start


def replicated(num_replicas: int, *frames: QueuedFrame) -> FrameQueue:
    queue = FrameQueue(max_batch=1, max_waiting=6, num_replicas=num_replicas)
    for frame in frames:
        queue.enqueue(frame, frame.arrived_s)
    return queue


def test_every_free_replica_gets_a_batch_and_no_more_than_they_are():
    queue = replicated(2, *(queued(n, f"s{n}", 0.0) for n in range(3)))
    assert [numbers(queue.next_batch(0.0)[0]) for _ in range(3)] == [[0], [1], []]
    assert numbers(queue.admission.in_flight) == [0, 1]


def test_whichever_replica_ends_first_gets_the_next_batch():
    queue = replicated(2, *(queued(n, f"s{n}", 0.0) for n in range(3)))
    first, second = start(queue, 0.0), start(queue, 0.0)
    finish(queue, second, 0.01, 0.01)
    assert numbers(start(queue, 0.01)) == [2]
    assert queue.admission.in_flight[0] is first[0]


def test_a_session_is_never_with_two_replicas():
    queue = replicated(2, queued(1, "a", 0.0))
    batch = start(queue, 0.0)
    queue.enqueue(queued(2, "a", 0.001), 0.001)
    assert queue.next_batch(0.001) == ([], [])
    finish(queue, batch, 0.02, 0.02)
    assert numbers(start(queue, 0.02)) == [2]


def test_frames_without_a_session_may_be_with_several_replicas():
    queue = replicated(2, *(queued(n, "caller", 0.0, is_session=False) for n in range(2)))
    assert [numbers(start(queue, 0.0)) for _ in range(2)] == [[0], [1]]


def test_the_time_until_there_is_room_shrinks_with_the_replicas():
    def room_s(num_replicas: int) -> float:
        queue = replicated(num_replicas, queued(0, "first", 0.0))
        finish(queue, start(queue, 0.0), 0.0, 0.02)
        for number in range(1, 5):
            queue.enqueue(queued(number, f"s{number}", 0.0), 0.0)
        return queue.clears_in_s(0.0)

    assert math.isclose(room_s(1), 5 * 0.02)
    assert math.isclose(room_s(2), 3 * 0.02)
    assert math.isclose(room_s(5), 0.02)


def test_a_deadline_that_a_second_replica_can_meet_is_not_refused():
    def offer(num_replicas: int) -> None:
        queue = replicated(num_replicas, queued(0, "first", 0.0))
        finish(queue, start(queue, 0.0), 0.0, 0.02)
        queue.enqueue(queued(1, "busy", 0.0), 0.0)
        start(queue, 0.0)
        queue.enqueue(queued(2, "first", 0.0, deadline_s=0.03), 0.0)

    with pytest.raises(DeadlineError):
        offer(1)
    offer(2)
