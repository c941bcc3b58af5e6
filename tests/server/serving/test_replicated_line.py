"""The waiting line where the policy is there several times."""

import math

from deft_server.serving.waiting_frames import Ticket
from deft_server.serving.waiting_line import Admission, LineRules, WaitingLine


def replicated_line(num_replicas: int, *tickets: Ticket, max_batch: int = 1) -> WaitingLine:
    rules = LineRules(max_batch, max_wait_s=0.01, max_waiting=6, num_replicas=num_replicas)
    line = WaitingLine(rules)
    for ticket in tickets:
        assert line.offer(ticket, ticket.arrived_s).admission is Admission.WAITS
    return line


def numbers(tickets: tuple[Ticket, ...]) -> list[int]:
    return [ticket.number for ticket in tickets]


def test_every_free_replica_gets_a_batch_and_no_more_than_they_are():
    line = replicated_line(2, *(Ticket(n, f"s{n}", 0.0) for n in range(3)))
    assert [numbers(line.decide(0.0).batch) for _ in range(3)] == [[0], [1], []]
    assert numbers(line.in_flight) == [0, 1]


def test_whichever_replica_ends_first_gets_the_next_batch():
    line = replicated_line(2, *(Ticket(n, f"s{n}", 0.0) for n in range(3)))
    first, second = line.decide(0.0).batch, line.decide(0.0).batch
    line.finish(0.01, 0.01, second)
    assert numbers(line.decide(0.01).batch) == [2]
    assert line.in_flight[:1] == first


def test_a_session_is_never_with_two_replicas():
    line = replicated_line(2, Ticket(1, "a", 0.0))
    batch = line.decide(0.0).batch
    line.offer(Ticket(2, "a", 0.001), 0.001)
    assert line.decide(0.001).batch == ()
    line.finish(0.02, 0.02, batch)
    assert numbers(line.decide(0.02).batch) == [2]


def test_frames_without_a_session_may_be_with_several_replicas():
    line = replicated_line(2, *(Ticket(n, "caller", 0.0, is_session=False) for n in range(2)))
    assert [numbers(line.decide(0.0).batch) for _ in range(2)] == [[0], [1]]


def test_the_time_until_there_is_room_shrinks_with_the_replicas():
    def room_s(num_replicas: int) -> float:
        line = replicated_line(num_replicas, Ticket(0, "first", 0.0))
        line.finish(0.0, 0.02, line.decide(0.0).batch)
        for number in range(1, 5):
            line.offer(Ticket(number, f"s{number}", 0.0, is_running=True), 0.0)
        return line.clears_in_s(0.0)

    assert math.isclose(room_s(1), 5 * 0.02)
    assert math.isclose(room_s(2), 3 * 0.02)
    assert math.isclose(room_s(5), 0.02)


def test_a_deadline_that_a_second_replica_can_meet_is_not_refused():
    def admission(num_replicas: int) -> Admission:
        line = replicated_line(num_replicas, Ticket(0, "first", 0.0))
        line.finish(0.0, 0.02, line.decide(0.0).batch)
        line.offer(Ticket(1, "busy", 0.0), 0.0)
        line.decide(0.0)
        return line.offer(Ticket(2, "urgent", 0.0, deadline_s=0.03), 0.0).admission

    assert admission(1) is Admission.TOO_LATE
    assert admission(2) is Admission.WAITS


def test_a_batch_waits_for_company_only_where_no_other_replica_is_free():
    def waits(num_replicas: int) -> bool:
        line = replicated_line(num_replicas, max_batch=2)
        for start_s in (0.0, 0.1, 0.2):
            for number in (0, 1):
                line.offer(Ticket(number, f"s{number}", start_s), start_s)
            line.finish(start_s + 0.02, 0.02, line.decide(start_s).batch)
        line.offer(Ticket(9, "s0", 0.299), 0.299)
        return line.decide(0.299).wake_s is not None

    assert waits(1)
    assert not waits(2)
