"""Chunks are handed out in order, one action at a time."""

import numpy as np
import pytest

from deft_client.action_queue import ActionQueue
from deft_client.types import ActionChunk

CHUNK = ActionChunk(np.arange(21.0).reshape(3, 7))


def test_a_new_queue_asks_for_actions():
    assert ActionQueue().is_empty
    with pytest.raises(IndexError, match="refill"):
        ActionQueue().next()


def test_actions_come_in_the_order_of_the_chunk():
    queue = ActionQueue()
    queue.refill(CHUNK)
    taken = []
    while not queue.is_empty:
        taken.append(queue.next())
    np.testing.assert_array_equal(taken, CHUNK.actions)


def test_only_the_first_actions_of_a_chunk_are_used_when_told_so():
    queue = ActionQueue(execute=2)
    queue.refill(CHUNK)
    assert len(queue) == 2


def test_a_newer_chunk_replaces_what_is_left():
    queue = ActionQueue()
    queue.refill(CHUNK)
    queue.next()
    queue.refill(ActionChunk(CHUNK.actions + 100))
    assert len(queue) == 3
    assert queue.next()[0] == 100


def test_an_episode_starts_with_nothing_left_over():
    queue = ActionQueue()
    queue.refill(CHUNK)
    queue.clear()
    assert queue.is_empty


def test_executing_less_than_one_action_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        ActionQueue(execute=0)
